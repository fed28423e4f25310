"""torch's ONNX exporter with a table that is kept: the same files, of all that is registered."""

import pytest
import torch
from onnxscript.function_libs.torch_lib import registration
from torch import Tensor, nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

import pt2e_quant as pq
from pt2e_quant.accelerate import composite_operators
from pt2e_quant.accelerate.onnx_tables import PATCH, kept_table
from pt2e_quant.accelerate.patch import VARIABLE

pytestmark = pytest.mark.skipif(not PATCH.is_on(), reason="other versions: nothing is replaced")


class Small(nn.Module):
    """Functions that are written with others, and a range that needs a functional operator."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.mish(self.conv(x))
        return torch.logaddexp(self.head(x.mean((2, 3))), torch.arange(5.0))


@pytest.mark.parametrize("off", [PATCH.name, composite_operators.PATCH.name, "all"])
def test_kept_table_when_switched_off_then_the_file_is_the_same(off, monkeypatch):
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 8, 8),)
    backend = pq.backends.get("onnx")
    prepared = pq.prepare_pt2e(torch.export.export(Small().eval(), inputs), backend.quantizer())
    prepared(*inputs)
    canonical = pq.convert_pt2e(prepared)

    def lowered() -> bytes:
        return backend.lower(canonical, verify=False).model

    first, second = lowered(), lowered()
    monkeypatch.setenv(VARIABLE, off)
    assert lowered() == first == second


def test_kept_table_when_an_export_registers_a_function_then_the_next_has_none_of_it():
    with kept_table():
        first = ONNXRegistry.from_torchlib(20)
        count = len(first.get_decomps(torch.ops.aten.add.Tensor))
        first.register_op(torch.ops.aten.add.Tensor, lambda x, y: x)
        again = ONNXRegistry.from_torchlib(20)
    assert len(again.get_decomps(torch.ops.aten.add.Tensor)) == count
    assert again.opset_version == 20


def test_kept_table_when_asked_for_another_opset_then_another_table():
    with kept_table():
        ONNXRegistry.from_torchlib(20)
        found = ONNXRegistry.from_torchlib(18)
    assert found.opset_version == 18
    assert found.functions.keys() == ONNXRegistry.from_torchlib(18).functions.keys()


def test_kept_table_when_a_function_was_registered_since_then_it_is_in_the_table(monkeypatch):
    with kept_table():
        before = ONNXRegistry.from_torchlib()
        name, found = next(
            (name, found)
            for name, found in registration.default_registry.items()
            if name.startswith("aten::") and found.overloads
        )
        monkeypatch.setattr(found, "overloads", [*found.overloads, *found.overloads])
        after = ONNXRegistry.from_torchlib()
    assert sum(map(len, after.functions.values())) > sum(map(len, before.functions.values())), name


def test_kept_table_when_left_then_nothing_is_replaced():
    before = ONNXRegistry.__dict__["from_torchlib"]
    with pytest.raises(ZeroDivisionError), kept_table():
        _ = ONNXRegistry.__dict__["from_torchlib"] is before or 1 / 0
    assert ONNXRegistry.__dict__["from_torchlib"] is before
