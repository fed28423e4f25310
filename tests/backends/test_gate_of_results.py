"""The gate judges each result alone: floats, integers, bools and written buffers."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2e_quant.backends.gate import check_artifact, choose_sample
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.read_capture import CAPTURE_KEY, rebuild_capture
from pt2e_quant.graph.alias import mutated_buffers


def exported(model: nn.Module, *args: Tensor) -> GraphModule:
    gm = torch.export.export(model.eval(), args).module()
    gm.meta[CAPTURE_KEY] = rebuild_capture(gm, mutated_buffers(gm))
    return gm


def check(artifact: Any, gm: GraphModule) -> None:
    check_artifact(artifact, gm, choose_sample(gm, None), margin_db=6.0)


class Pair(nn.Module):
    """A large result in front of a small one."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"large": 1000 * x, "small": x + 1}


def test_gate_when_a_large_result_hides_a_wrong_one_then_refused_by_name(artifact_of):
    gm = exported(Pair(), torch.randn(8, 8))

    def wrong(x: Tensor) -> list[Tensor]:
        return [1000 * x, 1.2 * (x + 1)]

    with pytest.raises(ArtifactError, match=r"graph: result\['small'\] SQNR 14\.0 dB"):
        check(artifact_of(gm, wrong), gm)
    faithful = artifact_of(gm, lambda x: [1000 * x, 1.005 * (x + 1)])
    check(faithful, gm)
    assert faithful.report.sqnr_canonical_db == pytest.approx(46.0, abs=0.1)


class Zeros(nn.Module):
    """What a graph makes of a signal below its smallest scale."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0


@pytest.mark.parametrize(
    ("made", "is_taken"),
    [
        (lambda x: [x * 1e-9], True),
        (lambda x: [x * 1e-3], False),
        (lambda x: [x * float("nan")], False),
        (lambda x: [x[:1] * 1e-9], False),
    ],
    ids=["below the scales", "above them", "not a number", "of another shape"],
)
def test_gate_when_the_graph_gives_zeros_then_less_than_its_least_scale_is_taken(
    artifact_of, made, is_taken
):
    gm = exported(Zeros(), torch.randn(8, 8))
    artifact = artifact_of(gm, made)
    if not is_taken:
        with pytest.raises(ArtifactError):
            check(artifact, gm)
        return
    check(artifact, gm)
    assert "the graph gives zeros, as its scales are 1.2e-07 or more" in str(artifact.report.notes)


def test_gate_when_a_result_is_missing_then_refused(artifact_of):
    gm = exported(Pair(), torch.randn(8, 8))
    with pytest.raises(ArtifactError, match=r"1 results, and no result\['large'\]"):
        check(artifact_of(gm, lambda x: [x]), gm)


class Chosen(nn.Module):
    """Scores, the place of the best, and which are above a bound that no input is near."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.head(x)
        return scores, scores.argmax(-1), x > 0.5


@pytest.mark.parametrize("at", [1, 2])
def test_gate_when_an_index_or_a_bool_is_wrong_then_refused(artifact_of, at):
    torch.manual_seed(0)
    gm = exported(Chosen(), torch.randn(64, 16))

    def wrong(x: Tensor) -> list[Tensor]:
        found = [value.clone() for value in gm(x)]
        if at == 1:
            found[1] = (found[1] + 1) % 10
        else:
            found[2][0, 0] = ~found[2][0, 0]
        return found

    text = rf"result\[{at}\] {64 if at == 1 else 1} of {64 if at == 1 else 1024} values differ"
    with pytest.raises(ArtifactError, match=text) as found:
        check(artifact_of(gm, wrong), gm)
    assert found.value.node_name is not None


def test_gate_when_an_index_flips_as_rounding_flips_it_then_accepted_with_a_note(artifact_of):
    torch.manual_seed(0)
    gm = exported(Chosen(), torch.randn(512, 16))

    def rounded(x: Tensor) -> list[Tensor]:
        scores = gm(x)[0]
        scores = (scores / 0.01).round() * 0.01  # ties and near ties
        return [scores, scores.argmax(-1), x > 0.5]

    artifact = artifact_of(gm, rounded)
    check(artifact, gm)
    assert "result[1]:" in "".join(artifact.report.notes)


def test_gate_when_one_index_of_constants_is_wrong_then_nothing_excuses_it(artifact_of):
    class Places(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, torch.arange(8) + (x[0, :8] > 0)

    gm = exported(Places(), torch.randn(8, 8))

    def wrong(x: Tensor) -> list[Tensor]:
        found = [*gm(x)]
        return [found[0], found[1].index_fill(0, torch.tensor([3]), 9)]

    with pytest.raises(ArtifactError, match=r"1 of 8 values differ, expected none"):
        check(artifact_of(gm, wrong), gm)


class Counter(nn.Module):
    """Adds up its inputs; the result does not show it before the next call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        before = self.total.clone()
        self.total.add_(x)
        self.calls.add_(1)
        return before + x


@pytest.fixture
def stateful(artifact_of) -> type[Any]:
    class Stateful(artifact_of):  # type: ignore[misc,valid-type]
        """Runs a module of its own, and shows its buffers or not."""

        def __init__(self, gm: GraphModule, module: nn.Module, *, is_shown: bool) -> None:
            super().__init__(gm, module)
            self.module, self.is_shown = module, is_shown

        def reset(self) -> None:
            for name, buffer in self.module.named_buffers():
                if name in self.capture.mutated_buffers:
                    buffer.zero_()

        def state(self) -> Mapping[str, Tensor]:
            return dict(self.module.named_buffers()) if self.is_shown else {}

    return Stateful


@pytest.mark.parametrize("is_shown", [True, False])
def test_gate_when_calls_write_buffers_then_both_start_and_go_on_alike(stateful, is_shown):
    gm = exported(Counter(), torch.randn(4))
    module = Counter()
    check(stateful(gm, module, is_shown=is_shown), gm)
    assert int(module.calls) == 0
    assert int(gm.get_buffer("calls")) == 0


class Forgetful(Counter):
    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x


class Miscounting(Counter):
    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x)


@pytest.mark.parametrize(
    ("module", "is_shown", "text"),
    [
        (Forgetful(), False, r"in call 2, with x \[4\]: SQNR"),
        (Forgetful(), True, "graph: buffer total SQNR"),
        (Miscounting(), True, "graph: buffer calls 1 of 1 values differ"),
    ],
)
def test_gate_when_a_buffer_is_not_written_as_the_graph_does_then_refused(
    stateful, module, is_shown, text
):
    gm = exported(Counter(), torch.randn(4))
    with pytest.raises(ArtifactError, match=text):
        check(stateful(gm, module, is_shown=is_shown), gm)


def test_gate_when_reset_does_not_forget_then_refused(stateful, monkeypatch):
    gm = exported(Counter(), torch.randn(4))
    artifact = stateful(gm, Counter(), is_shown=False)
    monkeypatch.setattr(artifact, "reset", lambda: None)
    with pytest.raises(ArtifactError, match="the sample again, behind other calls and a reset"):
        check(artifact, gm)


def test_capture_when_results_are_named_then_the_graph_is_not_changed(artifact_of):
    gm = exported(Pair(), torch.randn(8, 8))
    before = gm.meta[CAPTURE_KEY]
    check(artifact_of(gm, lambda x: [1000 * x, x + 1]), gm)
    assert isinstance(before, Capture)
    assert gm.meta[CAPTURE_KEY] is before
