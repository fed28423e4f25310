import pytest
import torch
from torch.nn import functional as F

from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.tensors.kernels.choose_layout import best_layout
from pt2e_quant.tensors.kernels.dispatch import find_kernel
from pt2e_quant.tensors.prune import prune_2_4
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from tests.needs_vnni import NEEDS_VNNI

CASES = (
    ("w4_g32", "int4_tiles"),
    ("w4", "int4_tiles"),
    ("a8w4_g32", "a8w4_tiles"),
    ("int8_dynamic", "plain"),
    ("fp8_dynamic", "plain"),
    ("w8", "sparse_2_4"),
    ("w4", "sparse_2_4"),
    ("w4_g32", "sparse_2_4"),
)


@pytest.mark.parametrize(("name", "layout"), CASES)
@pytest.mark.parametrize("rows", [1, 5])
def test_gpu_kernels_when_run_by_their_definitions_then_agree_with_real_weights(name, layout, rows):
    """On the CPU the operators run their references, which the Triton kernels are held to."""
    scheme = scheme_named(name)
    generator = torch.Generator().manual_seed(rows)
    values, x = torch.randn(16, 64, generator=generator), torch.randn(rows, 64, generator=generator)
    bias = torch.randn(16, generator=generator)
    values = prune_2_4(values) if layout == "sparse_2_4" else values
    plain = QuantizedTensor.from_float(values, scheme.weight, input=scheme.input)
    weight = plain.to_layout(layout)
    kernel = find_kernel("linear", weight.form, "cuda", torch.float32)
    assert kernel is not None
    found = kernel.run(x, weight, bias)
    torch.testing.assert_close(found, F.linear(x, plain, bias), rtol=1e-4, atol=1e-4)


@NEEDS_VNNI
def test_layouts_when_chosen_on_a_cpu_then_are_those_of_its_kernels():
    chosen = {}
    for name in ("w8", "int8_dynamic", "w4", "w4_g32", "a8w4_g32", "nf4", "fp8_weight_only"):
        scheme = scheme_named(name)
        tensor = QuantizedTensor.from_float(torch.randn(16, 64), scheme.weight, input=scheme.input)
        chosen[name] = best_layout(tensor)
    assert chosen == {
        "w8": "onednn",
        "int8_dynamic": "onednn",
        "w4": "onednn",
        "w4_g32": "int4_rows",
        "a8w4_g32": "packed",
        "nf4": "packed",
        "fp8_weight_only": "plain",
    }
