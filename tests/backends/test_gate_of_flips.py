"""Floats behind step functions are right where no more of them flip than on other runtimes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from pt2e_quant.backends.gate import check_artifact
from pt2e_quant.backends.rounding_noise import (
    DRAWS,
    FLIP_DRAWS,
    flip_draws,
    run_with_flipped_steps,
)
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.read_capture import CAPTURE_KEY, rebuild_capture
from pt2e_quant.flow.calibrate.sample import Sample, sqnr_db

aten = torch.ops.aten

STEPS: dict[str, Any] = {
    "floor": lambda h: torch.floor(h * 4),
    "divide": lambda h: torch.div(h, 0.3, rounding_mode="floor"),
    "remainder": lambda h: torch.remainder(h, 0.5),
    "frac": lambda h: torch.frac(h * 3),
    "compare": lambda h: torch.where(h > 0.1, 1.0, -1.0) * h.abs().add(1),
    "cast": lambda h: (h * 4).to(torch.int64).to(torch.float32),
    "gather": lambda h: torch.linspace(-2, 2, 8)[h.argmax(-1)],
    "shrink": lambda h: nn.functional.hardshrink(h, 0.8),
    "sign": lambda h: torch.sign(h),
}


class Stepped(nn.Module):
    """A linear, a step function, and a smooth function behind it."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)
        self.step = STEPS[step]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.step(self.linear(x))) + 1


class Moved(Interpreter):
    """Sums that are rounded another way: 46 dB apart."""

    def __init__(self, gm: GraphModule, by: float = 0.005, target: Any = None) -> None:
        super().__init__(gm)
        self.by = by
        self.target = target

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.target == aten.linear.default:
            noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(9))
            value = value + self.by * value.std() * noise
        return self.target(value) if self.target and n.name == "tanh" else value


def graph_of(step: str, rows: int = 512) -> tuple[GraphModule, Sample]:
    torch.manual_seed(0)
    x = torch.randn(rows, 16)
    gm = torch.export.export(Stepped(step).eval(), (x,)).module()
    gm.meta[CAPTURE_KEY] = rebuild_capture(gm, ())
    with torch.no_grad():
        out = gm(x)
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    return gm, Sample(leaves=(x,), float_outputs=(out + 0.03 * out.std() * noise,))


def run(gm: GraphModule, **options: Any) -> Any:
    return lambda x: Moved(gm, **options).run(x, enable_io_processing=False)


@pytest.mark.parametrize("step", STEPS)
def test_gate_when_steps_flip_as_sums_are_rounded_then_accepted_with_a_note(step, artifact_of):
    gm, sample = graph_of(step)
    artifact = artifact_of(gm, run(gm))
    check_artifact(artifact, gm, sample, margin_db=6.0)
    assert artifact.report.sqnr_canonical_db < 35
    assert any("steps" in note and "flip" in note for note in artifact.report.notes)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", [{"by": 0.2}, {"target": torch.neg}], ids=["sums", "behind"])
def test_gate_when_more_than_steps_is_apart_then_refused(step, fault, artifact_of):
    gm, sample = graph_of(step)
    with pytest.raises(ArtifactError, match="SQNR"):
        check_artifact(artifact_of(gm, run(gm, **fault)), gm, sample, margin_db=6.0)


@pytest.mark.parametrize("step", STEPS)
@torch.no_grad()
def test_flipped_steps_when_nothing_else_is_disturbed_then_most_values_are_exact(step):
    gm, sample = graph_of(step)
    plain = gm(*sample.leaves)
    assert len(flip_draws(gm)) == FLIP_DRAWS
    for draw in range(DRAWS):
        (found,) = run_with_flipped_steps(gm, *sample.leaves, draw=draw)
        assert 0 < float((plain != found).double().mean()) < 0.1


LARGE = {
    "floor": lambda h: h - torch.floor(h),
    "cast": lambda h: h - h.to(torch.int64),
    "remainder": lambda h: torch.remainder(h, 0.5),
}


@pytest.mark.parametrize("step", LARGE)
@torch.no_grad()
def test_flipped_steps_when_sums_move_by_many_steps_then_no_more_than_steps_flips(step):
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return LARGE[step](self.linear(x) * 1e5)

    torch.manual_seed(0)
    x = torch.randn(512, 16)
    gm = torch.export.export(Large().eval(), (x,)).module()
    gm.meta[CAPTURE_KEY] = rebuild_capture(gm, ())
    (found,) = run_with_flipped_steps(gm, x)
    assert sqnr_db(gm(x), found) > 15


@torch.no_grad()
def test_flipped_steps_when_graph_is_smooth_then_it_is_exact():
    x = torch.randn(8, 16)
    gm = torch.export.export(nn.Sequential(nn.Linear(16, 8), nn.Tanh()).eval(), (x,)).module()
    gm.meta[CAPTURE_KEY] = rebuild_capture(gm, ())
    assert torch.equal(run_with_flipped_steps(gm, x)[0], gm(x))
    assert len(flip_draws(gm)) == 0
