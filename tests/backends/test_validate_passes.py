"""A pass of a lowering that changes what its graph computes is named, with the value."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import pt2e_quant as pq
from pt2e_quant.backends.edited_copy import edited_copy
from pt2e_quant.backends.validate_passes import PassValidation, validation_of
from pt2e_quant.core.errors import InvariantError
from pt2e_quant.core.qdq import is_dequantize, is_quantize
from pt2e_quant.flow.calibrate.sample import sample_of
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, PassResult, graph_pass

aten = torch.ops.aten


class Net(nn.Module):
    """Two linears, a clamp that no sample reaches, and a choice that hides small differences."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x.clamp(max=20.0)).relu()
        return self.last(hidden), (hidden + 0.5).sum(-1) > 0


@pytest.fixture
def gm(plain_backend) -> GraphModule:
    torch.manual_seed(0)
    data = [(torch.randn(8, 16),) for _ in range(3)]
    prepared = pq.prepare_pt2e(
        torch.export.export(Net().eval(), data[0]), plain_backend.quantizer()
    )
    pq.calibrate(prepared, data, progress=False)
    return pq.convert_pt2e(prepared)


def made(name: str, edit: Callable[[GraphModule], object]) -> GraphPass:
    def run(gm: GraphModule) -> PassResult:
        edit(gm)
        return PassResult(changed=True)

    run.__name__ = name
    return graph_pass(needs=(), gives=(), ends=(HAS_VALUES,))(run)


def find(gm: GraphModule, wanted: Callable[[Node], bool]) -> Node:
    return next(node for node in gm.graph.nodes if wanted(node))


def calls(target: object) -> Callable[[Node], bool]:
    return lambda node: node.target is target


def nothing(gm: GraphModule) -> None:
    """An edit that keeps every value."""
    find(gm, calls(aten.relu.default)).meta["seen"] = True


def flip(gm: GraphModule) -> None:
    """A fault of one operator."""
    layer = find(gm, calls(aten.linear.default))
    with gm.graph.inserting_before(layer):
        layer.update_arg(0, gm.graph.call_function(aten.flip.default, (layer.args[0], [-1])))


def lower_clamp(gm: GraphModule) -> None:
    """A fault that values of the sample's size do not show."""
    find(gm, calls(aten.clamp.default)).update_arg(2, 10.0)


def hide(gm: GraphModule) -> None:
    """A fault that no result shows: the sum behind it is above zero all the same."""
    find(gm, calls(aten.add.Tensor)).update_arg(1, 0.75)


def move_zero_point(gm: GraphModule) -> None:
    """One step of a quantize and not of its dequantize."""
    quantize = find(gm, lambda n: is_quantize(n) and is_dequantize(next(iter(n.users))))
    quantize.update_arg(2, quantize.args[2] + 8)


def drop_result(gm: GraphModule) -> None:
    output = gm.graph.output_node()
    output.args = ((output.args[0][0],),)


@pytest.mark.parametrize(
    ("fault", "target", "call"),
    [
        (flip, aten.linear.default, "the sample"),
        (lower_clamp, aten.clamp.default, "64 times the sample"),
        (hide, aten.add.Tensor, "the sample"),
        (move_zero_point, torch.ops.quantized_decomposed.quantize_per_tensor.default, "the sample"),
    ],
)
def test_validation_when_a_pass_is_at_fault_then_it_and_the_first_value_are_named(
    gm, fault, target, call
):
    passes = (made("first", nothing), made("faulty", fault), made("last", nothing))
    with pytest.raises(
        InvariantError, match=rf"the pass faulty changes [^$]* with {call}"
    ) as found:
        edited_copy(gm, passes, validation=PassValidation(gm, sample_of(gm)))
    node = next(n for n in gm.graph.nodes if n.name == found.value.node_name)
    assert node.target is target
    assert "test_validate_passes.py" in str(found.value) or is_quantize(node)


def test_validation_when_a_result_is_lost_then_the_pass_is_named(gm):
    with pytest.raises(InvariantError, match="lose changes the graph: result 1 is not there"):
        edited_copy(gm, (made("lose", drop_result),), validation=PassValidation(gm, sample_of(gm)))


def test_validation_when_passes_keep_every_value_then_nothing_is_raised(gm):
    before = copy.deepcopy(gm.state_dict())
    edited_copy(gm, (made("first", nothing),), validation=PassValidation(gm, sample_of(gm)))
    assert all(torch.equal(value, before[name]) for name, value in gm.state_dict().items())


def test_validation_when_not_asked_for_then_there_is_none(gm):
    assert validation_of(False, gm, None) is None
    assert isinstance(validation_of(True, gm, None), PassValidation)


@pytest.mark.parametrize(
    ("name", "needs", "replaced"),
    [
        ("cpu", "torch", "widen_scales"),
        ("cuda", "torch", "duplicate_dequantize"),
        ("onnx", "onnxruntime", "widen_scales"),
        ("xnnpack", "executorch", "widen_scales"),
    ],
)
def test_backend_when_it_validates_then_a_faulty_pass_of_its_own_is_named(
    name, needs, replaced, gm, monkeypatch
):
    pytest.importorskip(needs)
    backend = pq.backends.get(name)
    # One pass of each pipeline, by the name that its file has it under.
    place = f"pt2e_quant.backends.{name}.lower.{replaced}"
    monkeypatch.setattr(place, made("faulty", flip))
    with pytest.raises(InvariantError, match="the pass faulty changes"):
        backend.lower(gm, strict=False, verify=False, validate=True)
    monkeypatch.undo()
    backend.lower(gm, strict=False, verify=False, validate=True)
