"""The gate calls an artifact at several sizes, in several orders, with fresh data."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from pt2e_quant.backends.gate import check_artifact
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.flow.calibrate.input_ranges import RANGES_KEY
from pt2e_quant.flow.calibrate.sample import Sample

Call = Callable[..., Any]


def exported(model: nn.Module, *args: Tensor, **shapes: Any) -> GraphModule:
    return torch.export.export(model.eval(), args, dynamic_shapes=shapes or None).module()


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.fixture
def gm() -> GraphModule:
    return exported(Double(), torch.randn(4, 6), x={0: Dim("batch", min=3, max=64)})


def sample(gm: GraphModule, *leaves: Any) -> Sample:
    return Sample(leaves=leaves or (torch.randn(4, 6),), float_outputs=None)


def check(artifact: Any, gm: GraphModule, *leaves: Any) -> None:
    check_artifact(artifact, gm, sample(gm, *leaves), margin_db=6.0)


def test_gate_when_a_dimension_is_dynamic_then_each_size_twice_and_both_orders(artifact_of, gm):
    seen: list[Tensor] = []

    def call(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return x * 2

    check(artifact_of(gm, call), gm)
    sizes = [x.shape[0] for x in seen]
    assert sizes == [4, 3, 64, 4, 64, 3, 4, 4]
    assert len({x.sum().item() for x in seen[:-1]}) == 7  # fresh data
    assert torch.equal(seen[0], seen[-1])
    low, high = seen[0].aminmax()
    assert all(low <= x.min() and x.max() <= high for x in seen)


@pytest.mark.parametrize("size", [3, 64])
def test_gate_when_wrong_at_one_size_then_refused_with_that_size(artifact_of, gm, size):
    def wrong(x: Tensor) -> Tensor:
        return x * (2.5 if len(x) == size else 2)

    with pytest.raises(ArtifactError, match=rf"in call \d, with x \[{size}, 6\]: SQNR 12\.0 dB"):
        check(artifact_of(gm, wrong), gm)


def test_gate_when_a_larger_call_spoils_the_next_then_refused(artifact_of, gm):
    most = 0

    def wrong(x: Tensor) -> Tensor:
        nonlocal most
        most, before = max(most, len(x)), most
        return x * (3 if len(x) < before else 2)

    with pytest.raises(ArtifactError, match=r"with x \[3, 6\]"):
        check(artifact_of(gm, wrong), gm)


def test_gate_when_the_second_call_is_wrong_then_refused(artifact_of):
    gm = exported(Double(), torch.randn(4, 6))
    calls = 0

    def wrong(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * (2 if calls == 1 else 3)

    with pytest.raises(ArtifactError, match=r"in call 2, with x \[4, 6\]: SQNR 6\.0 dB"):
        check(artifact_of(gm, wrong), gm)


def test_gate_when_only_calibrations_sample_is_right_then_refused(artifact_of):
    """What a program keeps of the sample, uninitialised memory for instance, other data shows."""
    gm = exported(Double(), torch.randn(4, 6))
    x = torch.randn(4, 6)
    with pytest.raises(ArtifactError, match=r"in call 2"):
        check(artifact_of(gm, lambda _: x * 2), gm, x)


def test_gate_when_an_artifact_gives_its_results_one_memory_then_each_call_is_right(
    artifact_of, gm
):
    """A result is read before the next call; the gate keeps none."""
    memory = torch.empty(64, 6)

    def call(x: Tensor) -> Tensor:
        return torch.mul(x, 2, out=memory[: len(x)])

    check(artifact_of(gm, call), gm)


def test_gate_when_an_artifact_stops_at_a_size_then_the_error_says_which(artifact_of, gm):
    def stop(x: Tensor) -> Tensor:
        if len(x) > 15:
            raise RuntimeError("0x10")
        return x * 2

    text = r"the artifact stops in call 3, with x \[64, 6\]: RuntimeError: 0x10"
    with pytest.raises(ArtifactError, match=text):
        check(artifact_of(gm, stop), gm)


class Picky(nn.Module):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return x[at]


def test_gate_when_the_graph_itself_refuses_a_size_then_a_note(artifact_of):
    x, at = torch.randn(4, 6), torch.tensor([3])
    gm = exported(Picky(), x, at, x={0: Dim("rows", min=3, max=8)}, at=None)
    artifact = artifact_of(gm, lambda x, at: x[at])
    check(artifact, gm, x, at)
    (note,) = {n for n in artifact.report.notes}
    assert note.startswith("the call with x [3, 6], at [1] is not checked: the graph itself stops")
    assert "IndexError" in note


class Cropped(nn.Module):
    """Gives nothing of one column: a transposed convolution that crops what it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(10, 3, 2, stride=3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


def test_gate_when_the_graph_gives_no_element_then_the_call_is_not_checked(artifact_of):
    x, model = torch.randn(2, 10, 8, 6), Cropped()
    gm = exported(model, x, x={3: Dim("columns", max=8)})

    def stops_at_one(x):
        if x.shape[3] == 1:
            raise RuntimeError("nothing to compute")
        return gm(x)

    artifact = artifact_of(gm, stops_at_one)
    check(artifact, gm, x)
    (note,) = {n for n in artifact.report.notes}
    assert "x [2, 10, 8, 1] is not checked: the graph gives a tensor without" in note


class Spread(nn.Module):
    """Quantizes a standard deviation, which is NaN of one row."""

    def forward(self, x: Tensor) -> Tensor:
        q = QuantizePerTensor(x.std(0), 0.1, 0, -128, 127, torch.int8)
        return DequantizePerTensor(q, 0.1, 0, -128, 127, torch.int8)


def test_gate_when_the_graph_quantizes_nan_then_the_call_is_not_checked(artifact_of):
    x = torch.randn(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of one row
        gm = exported(Spread(), x, x={0: Dim("rows", min=1, max=8)})
        # What a runtime makes of NaN is its own choice.
        artifact = artifact_of(gm, lambda x: gm(x) if len(x) > 1 else torch.full((6,), -12.8))
        check(artifact, gm, x)
    (note,) = {n for n in artifact.report.notes}
    assert note == "the call with x [1, 6] is not checked: the graph quantizes NaN there"


def test_gate_when_two_dimensions_are_dynamic_then_each_is_small_while_the_other_is_large(
    artifact_of,
):
    gm = exported(Double(), torch.randn(4, 6), x={0: Dim("batch", max=8), 1: Dim("length", max=32)})
    seen = []

    def call(x: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return x * 2

    check(artifact_of(gm, call), gm)
    assert {(1, 1), (8, 32), (1, 32), (8, 1), (4, 6)} == {*seen}
    assert seen.index((8, 32)) < len(seen) - seen[::-1].index((1, 1)) - 1


class Deep(nn.Module):
    """2^30 multiplications a row."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(2**15, 2**15, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_sizes_when_a_call_is_dear_then_twice_the_sample_is_the_largest():
    from pt2e_quant.backends.trial_sizes import CHEAP, Work, plan_sizes
    from pt2e_quant.core.read_capture import capture_of

    x = torch.zeros(4, 2**15, device="meta")
    gm = exported(Deep().to("meta"), x, x={0: Dim("batch", max=512)})
    capture, work = capture_of(gm), Work(gm)
    (symbol,) = capture.dims
    one = work.at({symbol: 1})
    assert one == pytest.approx(2**30, rel=0.1)
    assert work.at({symbol: 8}) == 8 * one > CHEAP
    assert [s[symbol] for s in plan_sizes(capture, work, {symbol: 5})] == [1, 10]
    cheap = [s[symbol] for s in plan_sizes(capture, work, {symbol: 1})]
    assert cheap == [1, CHEAP // one, 1, CHEAP // one, 1]


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 4)

    def forward(self, ids: Tensor, mask: Tensor, at: Tensor) -> Tensor:
        rows = self.table(ids) * mask[..., None]
        return rows.index_add(1, at, self.table.weight[None, : at.shape[0]].expand(2, -1, -1))


def test_data_when_integers_then_inside_the_range_seen_and_masks_and_positions_stay_such(
    artifact_of,
):
    ids, mask = torch.tensor([[7, 3, 3, 9], [20, 4, 7, 5]]), torch.tensor([[1, 1, 1, 0]] * 2)
    at = torch.arange(4)
    length = Dim("length", min=3, max=16)
    gm = exported(Lookup(), ids, mask, at, ids={1: length}, mask={1: length}, at={0: length})
    gm.meta[RANGES_KEY] = ((3.0, 40.0), (0.0, 1.0), (0.0, 15.0))
    seen = []

    def call(*leaves: Tensor) -> Any:
        seen.append(leaves)
        return gm(*leaves)

    check(artifact_of(gm, call), gm, ids, mask, at)
    assert {len(leaves[2]) for leaves in seen} == {3, 4, 16}
    for ids, mask, at in seen:
        assert ids.min() >= 3
        assert ids.max() <= 40
        assert {*mask.unique().tolist()} <= {0, 1}
        assert torch.equal(at, torch.arange(len(at)))
    assert max(leaves[0].max() for leaves in seen) > 20
