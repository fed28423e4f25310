"""What algorithms made of weights stays where the whole model gains by it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.effort import Effort
from pt2e_quant.graph.ops import CONV, LINEAR
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.choose_ranges import ChooseRanges
from pt2e_quant.passes.algorithms.registry import with_effort


@dataclass(frozen=True, slots=True, kw_only=True)
class AddSteps(Algorithm):
    """Moves every weight by some steps, and fixes the scales at what they were times a factor."""

    name: ClassVar[str] = "add_steps"
    paper: ClassVar[str] = "none"
    fits: ClassVar[str] = "layers"
    stage: ClassVar[Stage] = Stage.CORRECTIONS
    needs_calls: ClassVar[bool] = True

    steps: float
    factor: float = 1.0

    def sites(self, graph) -> Iterable[Site]:
        return [Site(graph, node, "weight") for node in graph.quantized((*CONV, *LINEAR))]

    def apply(self, site, statistics) -> str:
        weight = site.graph.constant(site.node, "weight", keeps_qparams=True)
        scale = weight.qparams().scale
        moved = self.steps * scale.reshape(-1, *[1] * (weight.value.dim() - 1))
        weight.set_scale(scale * self.factor)
        weight.set(weight.value + moved, keeps_qparams=True)
        weight.note(self.name)
        return self.name


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)
    )


def images(count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 3, 8, 8, generator=generator) for _ in range(count)]


def converted(model, *algorithms, effort="fast"):
    data = images(8, seed=1)
    quantizer = pq.backends.get("onnx").quantizer("int8")
    program = torch.export.export(model, (data[0],))
    prepared = pq.prepare_pt2e(program, quantizer, algorithms=algorithms, effort=effort)
    return pq.convert_pt2e(pq.calibrate(prepared, data, progress=False))


def notes_of(gm):
    return [note for note in pq.provenance_of(gm).notes if "plain rounding" in note]


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_confirm_weights_when_the_model_loses_then_weights_and_scales_are_taken_back(factor):
    model, x = build(), images(1, seed=2)[0]
    spoilt = AddSteps(steps=20.0, factor=factor)
    plain, worse = converted(model), converted(model, spoilt)
    assert not torch.allclose(worse(x), plain(x), atol=1e-3)
    gm = converted(model, spoilt, "confirm_weights")
    assert torch.equal(gm(x), plain(x))
    (note,) = notes_of(gm)
    assert "weights are rounded plainly: on 8 calls" in note
    steps = [r.steps for r in pq.provenance_of(gm).tensors if "add_steps" in r.steps]
    assert steps
    assert all(s[-1] == "confirm_weights: rounded plainly again" for s in steps)


def test_confirm_weights_when_the_model_gains_then_they_stay():
    model, x = build(), images(1, seed=2)[0]
    chosen = ("gptq", "bias_correction")
    expected = converted(model, *chosen)
    assert not torch.equal(expected(x), converted(model)(x))
    gm = converted(model, *chosen, "confirm_weights")
    assert torch.equal(gm(x), expected(x))
    assert "weights are as chosen" in notes_of(gm)[0]


def test_confirm_weights_when_nothing_was_changed_then_declined():
    gm = converted(build(), "confirm_weights")
    assert any("differs from the float model's" in note for note in pq.provenance_of(gm).notes)


def test_effort_when_best_then_weights_are_chosen_and_confirmed():
    gm = converted(build(), effort="best")
    assert notes_of(gm)
    assert any("gptq" in step for r in pq.provenance_of(gm).tensors for step in r.steps)


@pytest.mark.parametrize(
    ("asked", "brought"),
    [
        ((), ["gptq", "batch_norm_reestimation", "bias_correction", "confirm_weights"]),
        (("adaround",), ["batch_norm_reestimation", "bias_correction", "confirm_weights"]),
        (("bias_correction",), ["gptq", "confirm_weights"]),
    ],
)
def test_with_effort_when_best_then_what_was_asked_for_is_not_brought_again(asked, brought):
    own, wanted = with_effort((ChooseRanges(any_observer=False),), asked, Effort.BEST)
    assert [algorithm.name for algorithm in own] == brought
    assert wanted == (*asked, ChooseRanges())


def test_effort_when_best_and_a_model_has_no_layer_that_gptq_takes_then_no_error():
    model, x = nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.ReLU()), images(8, seed=1)
    quantizer = pq.backends.get("xnnpack").quantizer("int8")
    program = torch.export.export(model, (x[0],))
    prepared = pq.prepare_pt2e(program, quantizer, effort="best")
    gm = pq.convert_pt2e(pq.calibrate(prepared, x, progress=False))
    assert pq.sqnr_db(model(x[0]), gm(x[0])) > 30
