"""q/dq operators translated one by one: the exported model gives torch's result."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import onnx_ir as ir
import torch.ao.quantization.fx._decomposed  # registers the operators

from pt2e_quant.backends.onnx.lower import export_model
from pt2e_quant.backends.onnx.runtime import SessionCall, open_session

Q: Any = torch.ops.quantized_decomposed


class Call(nn.Module):
    """A function of inputs and buffers as a module."""

    def __init__(self, function: Any, **buffers: Tensor) -> None:
        super().__init__()
        self.function = function
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


def export(model: nn.Module, *args: Tensor, portable: bool = False) -> ir.Model:
    program = torch.export.export(model.eval(), args)
    return export_model(program, ["y"], portable=portable)[0]


def run(model: ir.Model, args: Sequence[Tensor]) -> Tensor:
    return SessionCall(open_session(ir.to_proto(model).SerializeToString())).run(args)[0]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)) * 3


RANGES = [
    (torch.uint8, 0, 255, 120),
    (torch.uint8, 10, 200, 90),
    (torch.int8, -128, 127, -5),
    (torch.int8, -127, 127, 0),
    (torch.int8, -8, 7, 0),
    (torch.int16, -32768, 32767, 11),
    (torch.int16, -1000, 900, 0),
    (torch.uint16, 0, 65535, 30000),
]


@pytest.mark.parametrize(("dtype", "low", "high", "zero"), RANGES)
def test_quantize_per_tensor_when_exported_then_range_and_type_are_kept(
    x: Tensor, dtype: torch.dtype, low: int, high: int, zero: int
) -> None:
    def both(_: nn.Module, x: Tensor) -> Tensor:
        q = Q.quantize_per_tensor(x, 0.03, zero, low, high, dtype)
        return Q.dequantize_per_tensor(q, 0.03, zero, low, high, dtype)

    model = export(Call(both), x)
    torch.testing.assert_close(run(model, [x]), both(nn.Module(), x), rtol=0, atol=1e-6)
    has_clip = any(node.op_type == "Clip" for node in model.graph)
    info = torch.iinfo(dtype)
    assert has_clip == ((low, high) != (info.min, info.max))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_quantize_per_channel_when_exported_then_axis_is_kept(x: Tensor, axis: int) -> None:
    size = x.shape[axis]
    scales, zeros = torch.linspace(0.01, 0.1, size), torch.arange(size)

    def both(m: Any, x: Tensor) -> Tensor:
        q = Q.quantize_per_channel(x, m.scales, m.zeros, axis, -127, 127, torch.int8)
        return Q.dequantize_per_channel(q, m.scales, m.zeros, axis, -127, 127, torch.int8)

    model = Call(both, scales=scales, zeros=zeros)
    torch.testing.assert_close(run(export(model, x), [x]), model(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("limits", [(-8, 7), (-7, 7)])
def test_weight_of_four_bits_when_exported_then_it_is_stored_in_four(
    x: Tensor, limits: tuple[int, int]
) -> None:
    weight = torch.randint(-7, 8, (64, 4), dtype=torch.int8)
    scales, zeros = torch.linspace(0.01, 0.1, 64), torch.zeros(64, dtype=torch.int32)

    def linear(m: Any, x: Tensor) -> Tensor:
        w = Q.dequantize_per_channel(m.weight, m.scales, m.zeros, 0, *limits, torch.int8)
        return torch.nn.functional.linear(x, w)

    module = Call(linear, weight=weight, scales=scales, zeros=zeros)
    model = export(module, x, portable=True)
    stored = [v for v in model.graph.initializers.values() if v.shape == (64, 4)]
    assert [v.dtype for v in stored] == [ir.DataType.INT4]
    # ONNX Runtime multiplies by 4-bit weights with activations rounded to 8 bits.
    torch.testing.assert_close(run(model, [x]), module(x), rtol=0.05, atol=0.05)
    # Its own operator takes one block of 16, two integers a byte, and computes in float.
    model = export(module, x)
    assert (64, 1, 8) in [v.shape for v in model.graph.initializers.values()]
    torch.testing.assert_close(run(model, [x]), module(x), rtol=1e-5, atol=1e-5)


def test_weight_in_groups_when_exported_then_blocks_are_along_the_last_axis(x: Tensor) -> None:
    weight = torch.randint(-7, 8, (8, 64), dtype=torch.int8)
    scales, zeros = torch.rand(8, 2) + 0.1, torch.zeros(8, 2, dtype=torch.int32)

    def dequantize(m: Any, x: Tensor) -> Tensor:
        w = Q.dequantize_per_channel_group(
            m.weight, m.scales, m.zeros, -8, 7, torch.int8, 32, torch.float32
        )
        return x.sum() + w

    module = Call(dequantize, weight=weight, scales=scales, zeros=zeros)
    torch.testing.assert_close(run(export(module, x), [x]), module(x), rtol=1e-5, atol=1e-5)


def test_dynamic_quantize_when_exported_then_dynamic_matmul_runs(x: Tensor) -> None:
    weight = torch.randint(-127, 128, (8, 4), dtype=torch.int8)
    scales, zeros = torch.linspace(0.01, 0.1, 8), torch.zeros(8, dtype=torch.int32)

    def linear(m: Any, x: Tensor) -> Tensor:
        qparams = Q.choose_qparams.tensor(x, 0, 255, 1.2e-7, torch.uint8)
        q = Q.quantize_per_tensor.tensor(x, *qparams, 0, 255, torch.uint8)
        x = Q.dequantize_per_tensor.tensor(q, *qparams, 0, 255, torch.uint8)
        w = Q.dequantize_per_channel(m.weight, m.scales, m.zeros, 0, -127, 127, torch.int8)
        return torch.nn.functional.linear(x, w, m.bias)

    module = Call(linear, weight=weight, scales=scales, zeros=zeros, bias=torch.randn(8))
    model = export(module, x)
    torch.testing.assert_close(run(model, [x]), module(x), rtol=1e-4, atol=1e-4)
    assert "DynamicQuantizeLinear" in [n.op_type for n in model.graph]


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    ("dims", "is_quantized", "expected"),
    [
        ((2,), True, "GlobalAveragePool"),
        ((-1,), True, "GlobalAveragePool"),
        ((1,), True, "ReduceMean"),
        ((1, 2), True, "ReduceMean"),
        ((2,), False, "ReduceMean"),
    ],
)
def test_mean_when_of_integers_over_spatial_axes_then_it_is_a_pool(
    x: Tensor, dims: tuple[int, ...], is_quantized: bool, expected: str, keepdim: bool
) -> None:
    def mean(_: nn.Module, x: Tensor) -> Tensor:
        if is_quantized:
            q = Q.quantize_per_tensor(x, 0.03, 120, 0, 255, torch.uint8)
            x = Q.dequantize_per_tensor(q, 0.03, 120, 0, 255, torch.uint8)
        return x.mean(dims, keepdim=keepdim)

    model = export(Call(mean), x)
    assert expected in [n.op_type for n in model.graph]
    torch.testing.assert_close(run(model, [x]), mean(nn.Module(), x))


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    ("dims", "expected"),
    [((2, 3), "GlobalAveragePool"), ((-1, -2), "GlobalAveragePool"), ((1, 2), "ReduceMean")],
)
def test_mean_when_of_images_in_float_over_spatial_axes_then_it_is_a_pool(
    dims: tuple[int, ...], expected: str, keepdim: bool
) -> None:
    images = torch.randn(2, 3, 5, 4)
    model = export(Call(lambda _, x: x.mean(dims, keepdim=keepdim)), images)
    assert expected in [n.op_type for n in model.graph]
    torch.testing.assert_close(run(model, [images]), images.mean(dims, keepdim=keepdim))


@pytest.mark.parametrize("shape", [(2, 8), (2, 8, 7), (3, 8, 5, 4), (2, 8, 3, 4, 2)])
@pytest.mark.parametrize(("groups", "has_affine"), [(1, True), (4, True), (8, True), (2, False)])
def test_group_norm_when_of_floats_then_an_instance_norm_of_the_same_values(
    shape: tuple[int, ...], groups: int, has_affine: bool
) -> None:
    torch.manual_seed(0)
    norm = nn.GroupNorm(groups, 8, affine=has_affine).eval()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(shape)
    model = export(norm, x)
    assert "InstanceNormalization" in [n.op_type for n in model.graph]
    with torch.no_grad():
        torch.testing.assert_close(run(model, [x]), norm(x), rtol=1e-4, atol=1e-5)
