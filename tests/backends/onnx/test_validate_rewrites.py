"""A rewrite of an ONNX model that changes what it computes is named, with the value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import pt2e_quant as pq
from pt2e_quant.core.errors import InvariantError

ir = pytest.importorskip("onnx_ir", reason="the extra onnx is not installed")
pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import numpy as np  # noqa: E402

from pt2e_quant.backends.onnx.rewrites import pipeline  # noqa: E402
from pt2e_quant.backends.onnx.validate_rewrites import RewriteValidation  # noqa: E402
from pt2e_quant.backends.onnx.values import constant, make_constant  # noqa: E402


class Net(nn.Module):
    """Two linears, a clamp that no sample reaches, and a choice that hides small differences."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        hidden = self.first(x.clamp(max=20.0)).tanh() + self.calls
        return self.last(hidden).softmax(-1), (hidden + 0.5).sum(-1) > 0


def converted(model: nn.Module, recipe: str = "int8") -> GraphModule:
    torch.manual_seed(0)
    data = [(torch.randn(8, 16),) for _ in range(3)]
    quantizer = pq.backends.get("onnx").quantizer(recipe)
    prepared = pq.prepare_pt2e(torch.export.export(model.eval(), data[0]), quantizer)
    pq.calibrate(prepared, data, progress=False)
    return pq.convert_pt2e(prepared)


@pytest.fixture
def gm() -> GraphModule:
    torch.manual_seed(0)
    return converted(Net())


def lower(gm: GraphModule, **settings: Any) -> Any:
    backend = pq.backends.get("onnx")
    return backend.lower(gm, strict=False, verify=False, validate=True, **settings)


def node_of(graph: Any, op_type: str) -> Any:
    return next(node for node in graph if node.op_type == op_type)


def scale_constant(graph: Any, op_type: str, index: int, by: float) -> int:
    """Multiply a constant that one operator reads."""
    node = node_of(graph, op_type)
    array = constant(node.inputs[index])
    assert array is not None
    moved = make_constant(graph, "moved", (array * by).astype(array.dtype))
    node.replace_input_with(index, moved)
    return 1


def change_scale(graph: Any) -> int:
    """A fault of one operator on every call."""
    return scale_constant(graph, "QuantizeLinear", 1, 4.0)


def lower_clip(graph: Any) -> int:
    """A fault that values of the sample's size do not show."""
    kind = "Clip" if any(n.op_type == "Clip" for n in graph) else "Min"
    return scale_constant(graph, kind, 2 if kind == "Clip" else 1, 0.5)


def swap_results(graph: Any) -> int:
    tanh = node_of(graph, "Tanh")
    tanh.op_type = "Sin"
    return 1


def hide(graph: Any) -> int:
    """A fault that no result shows: the sum behind it is above zero all the same."""
    halves = [
        (node, at)
        for node in graph
        for at, value in enumerate(node.inputs)
        if node.op_type == "Add" and np.array_equal(constant(value), np.float32(0.5))
    ]
    node, at = halves[0]
    node.replace_input_with(at, make_constant(graph, "more", np.array(0.75, np.float32)))
    return 1


@pytest.mark.parametrize(
    ("fault", "call"),
    [
        (change_scale, "the sample"),
        (lower_clip, "64 times the sample"),
        (swap_results, "the sample"),
        (hide, "the sample"),
    ],
)
def test_validation_when_a_rewrite_is_at_fault_then_it_and_the_first_value_are_named(
    gm, fault: Callable[[Any], int], call, monkeypatch
):
    monkeypatch.setattr(pipeline, "REWRITES", (fault, *pipeline.REWRITES))
    with pytest.raises(
        InvariantError, match=rf"the step to ONNX {fault.__name__} changes [^$]* with {call}"
    ) as found:
        lower(gm)
    assert found.value.node_name
    assert "test_validate_rewrites.py" in str(found.value) or fault is change_scale


def test_validation_when_the_export_is_at_fault_then_it_is_named(gm, monkeypatch):
    export = torch.onnx.export

    def wrong(*args: Any, **kwargs: Any) -> Any:
        program = export(*args, **kwargs)
        swap_results(program.model.graph)
        return program

    monkeypatch.setattr(torch.onnx, "export", wrong)
    with pytest.raises(InvariantError, match=r"ONNX torch\.onnx\.export changes result 0"):
        lower(gm)


@pytest.mark.parametrize(
    ("recipe", "portable"),
    [("int8", True), ("int8_dynamic", False), ("w4_g32", False), ("a8w4_g32", True)],
)
def test_validation_when_rewrites_keep_every_value_then_all_of_them_ran(
    recipe, portable, monkeypatch
):
    """Between the marks and the rewrites that take them out there is nothing to run."""
    left: list[list[str]] = []
    after = RewriteValidation.after

    def noted(self: RewriteValidation, name: str, model: Any) -> None:
        after(self, name, model)
        left.append(list(self.changes))

    monkeypatch.setattr(RewriteValidation, "after", noted)
    torch.manual_seed(0)
    lower(converted(Net(), recipe), portable=portable)
    assert len(left) > 1
    assert left[-1] == []


def test_validation_when_a_rewrite_leaves_what_cannot_run_then_the_next_ones_are_named_with_it(
    gm, monkeypatch
):
    def forget(graph: Any) -> int:
        node_of(graph, "Tanh").op_type = "NoOperator"
        return 1

    def remember(graph: Any) -> int:
        node_of(graph, "NoOperator").op_type = "Sin"
        return 1

    monkeypatch.setattr(pipeline, "REWRITES", (forget, remember, *pipeline.REWRITES))
    with pytest.raises(InvariantError, match="one of the steps to ONNX forget, remember changes"):
        lower(gm)


def test_bound_when_noise_moves_a_value_then_less_is_asked_of_it(gm, monkeypatch):
    """Noise above the values' own size leaves nothing to compare: a fault passes."""
    import pt2e_quant.backends.onnx.validate_rewrites as file

    monkeypatch.setattr(file, "_NOISE", 100.0)
    monkeypatch.setattr(pipeline, "REWRITES", (*pipeline.REWRITES, swap_results))
    lower(gm)
