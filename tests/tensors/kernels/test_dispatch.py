import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.profiler import profile

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.tensors import QuantizedTensor, register_kernel, unregister_kernel
from pt2e_quant.tensors.functions import emit_input
from tests.needs_vnni import NEEDS_VNNI


def quantized(name, layout):
    scheme = scheme_named(name)
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    return QuantizedTensor.from_float(values, scheme.weight, layout=layout, input=scheme.input)


def ranges(run):
    with profile() as profiler:
        run()
    return [e.name for e in profiler.events() if e.name.startswith("pt2e_quant::linear ")]


@pytest.mark.parametrize(
    ("name", "layout", "expected"),
    [
        pytest.param("w8", "onednn", "int8 onednn linear_of_limbs", marks=NEEDS_VNNI),
        pytest.param("int8_dynamic", "onednn", "int8 onednn int8_linear_rows", marks=NEEDS_VNNI),
        ("w8", "plain", "int8 plain linear_of_codes"),
        ("int8_dynamic", "plain", "int8 plain int8_linear_of_codes"),
        ("w4_g32", "packed", "int4 packed reference"),
        ("w4_g32", "int4_rows", "int4 int4_rows linear_of_int4"),
        ("mxfp8", "plain", "float8_e4m3fn plain reference"),
    ],
)
def test_dispatch_when_profiled_then_range_says_format_layout_and_kernel(name, layout, expected):
    weight, x = quantized(name, layout), torch.randn(3, 64)
    assert ranges(lambda: F.linear(x, weight)) == [f"pt2e_quant::linear {expected}"]


def test_kernel_when_a_user_registers_one_then_it_runs_and_is_seen():
    weight, x = quantized("w4_g32", "packed"), torch.randn(3, 64)
    calls, kept_under = [], weight._stable_hash_for_caching()

    def mine(x, weight, bias):
        calls.append(weight.form.format_name)
        return F.linear(x, weight.dequantize(), bias)

    register_kernel(mine, name="test_mine", layout="packed", formats=["int4"])
    try:
        with pytest.raises(ConfigError, match='"test_mine" already'):
            register_kernel(mine, name="test_mine")
        assert ranges(lambda: F.linear(x, weight)) == ["pt2e_quant::linear int4 packed test_mine"]
        assert calls == ["int4"]
        F.linear(x, quantized("w8", "plain"))
        assert calls == ["int4"]
        assert weight._stable_hash_for_caching() != kept_under
    finally:
        unregister_kernel("test_mine")
    with pytest.raises(ConfigError, match='no kernel "test_mine"'):
        unregister_kernel("test_mine")


@NEEDS_VNNI
def test_dispatch_when_a_function_hides_its_linear_then_the_kernel_still_runs():
    layer = nn.MultiheadAttention(64, 4, batch_first=True).eval()
    layer.out_proj.weight = nn.Parameter(quantized_rows("int8_dynamic"), requires_grad=False)
    x = torch.randn(2, 3, 64)
    found = ranges(lambda: layer(x, x, x))
    assert found == ["pt2e_quant::linear int8 onednn int8_linear_rows"]


def quantized_rows(name):
    scheme = scheme_named(name)
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    return QuantizedTensor.from_float(values, scheme.weight, layout="onednn", input=scheme.input)


@pytest.mark.parametrize("name", ["w8", "int8_dynamic", "w4"])
@NEEDS_VNNI
def test_kernels_of_onednn_when_held_to_the_reference_then_agree(name):
    plain, packed = quantized(name, "plain"), quantized(name, "onednn")
    for rows in (1, 5, 40):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        expected, found = F.linear(x, plain), F.linear(x, packed)
        # 16 bits of a row's largest, see `limbs_op.error_bound`
        torch.testing.assert_close(found, expected, rtol=0, atol=64 * 3e-5 * float(x.abs().max()))


@pytest.mark.parametrize("name", ["w8", "int8_dynamic"])
def test_kernels_of_plain_codes_when_held_to_real_values_then_agree(name):
    weight, bias = quantized(name, "plain"), torch.randn(16)
    for shape in ((64,), (1, 64), (2, 3, 64), (0, 64)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        real = x if weight.form.input is None else emit_input(x, weight)
        expected = F.linear(real, weight.dequantize(), bias)
        torch.testing.assert_close(F.linear(x, weight, bias), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["w8", "int8_dynamic"])
@NEEDS_VNNI
def test_weights_when_packed_for_onednn_then_take_a_byte_a_code_and_a_scale_a_row(name):
    assert quantized(name, "onednn").nbytes == 16 * 64 + 16 * 4


@pytest.mark.parametrize("name", ["w8", "int8_dynamic"])
@NEEDS_VNNI
def test_kernels_of_onednn_when_a_compiler_follows_them_then_are_equal_to_the_bit(name):
    check_compiled(quantized_rows(name), "pt2e_quant.tensor_product.default")


@pytest.mark.parametrize("name", ["w8", "int8_dynamic"])
def test_kernels_of_plain_codes_when_a_compiler_follows_them_then_are_equal_to_the_bit(name):
    check_compiled(quantized(name, "plain"), "pt2e_quant.linear_of_codes.default")


def check_compiled(weight, operator):
    N = weight.shape[0]
    bias = torch.randn(N, generator=torch.Generator().manual_seed(2))
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    def linear(x):
        return F.linear(x, weight, bias)

    compiled = torch.compile(linear, fullgraph=True, backend=aot_autograd(fw_compiler=backend))
    with torch.no_grad():
        for shape in ((1, 64), (2, 3, 64), (0, 64)):
            torch._dynamo.reset()
            x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
            assert torch.equal(compiled(x), linear(x))
    assert seen.count(operator) == 3
