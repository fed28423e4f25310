"""Quantizers of other backends through torchao's own PT2E and through ours: the same result."""

from collections import Counter
from importlib import import_module

import pytest
import torch

pytest.importorskip("torchao")

from foreign import NETWORKS, QUANTIZERS
from pt2e_flows import QDQ, both
from pt2e_models import MODELS

pytestmark = pytest.mark.usefixtures("cached_patterns")

# Batch norm is folded in another order of operations.
ROUNDED = {"conv_bn_relu"}


def counts(outcome):
    found = Counter(outcome.counts)
    del found["_guards_fn"]
    return found


# nncf 3.4 asks the block's transposes for an axis of a scalar, under torchao too.
FAILS_UPSTREAM = {("openvino", "block")}
QUICK = ("x86_inductor", "vulkan", "cadence")
# Core ML's exports each of its patterns twice: minutes on a busy machine.
SLOW = (pytest.mark.slow, pytest.mark.timeout(3600))
QUICK_CASES = {
    ("cortex_m", "conv_net"),
    ("tosa", "conv_net"),
    ("x86_inductor", "conv_net"),
    ("cadence", "block"),
    ("vulkan", "block"),
}
CASES = [
    case if case in QUICK_CASES else pytest.param(*case, marks=SLOW)
    for case in ((quantizer, name) for quantizer in QUANTIZERS for name in NETWORKS)
]
DYNAMIC = "quantized_decomposed.dequantize_per_tensor.tensor"


def check_equal(theirs, ours, *, rounded=False):
    expected, found = counts(theirs), counts(ours)
    if DYNAMIC in expected:
        # Theirs keeps one dequantize for all readers of a dynamic quantize, ours has one for each.
        assert found[DYNAMIC] >= expected[DYNAMIC]
        expected[DYNAMIC] = found[DYNAMIC]
    assert found == expected
    assert sum(count for name, count in found.items() if QDQ in name) > 0
    if not rounded and DYNAMIC not in expected:
        assert ours.qparams == theirs.qparams
    for a, b in zip(ours.outputs, theirs.outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 if rounded else 0)


@pytest.mark.filterwarnings("ignore")  # torchao's and the vendors' own modules, at import
@pytest.mark.parametrize("name", ["two_linears", "conv_bn_relu", "residual_relu", "attention"])
@pytest.mark.parametrize("quantizer", QUICK)
def test_small_model_when_converted_then_as_torchao_converts(quantizer, name):
    QUANTIZERS[quantizer]()  # skips where it cannot be imported
    if quantizer == "vulkan" and name in ("conv_bn_relu", "residual_relu"):
        pytest.skip("Vulkan's quantizer takes linears only")
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    theirs, ours = both(model, inputs, QUANTIZERS[quantizer], strict=True)
    check_equal(theirs, ours, rounded=name in ROUNDED)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("quantizer", "name"), CASES)
def test_network_when_converted_then_as_torchao_converts(quantizer, name):
    QUANTIZERS[quantizer]()
    if (quantizer, name) in FAILS_UPSTREAM:
        pytest.skip("the quantizer itself fails on this network, under torchao too")
    torch.manual_seed(0)
    model, inputs = NETWORKS[name]()
    theirs, ours = both(model, inputs, QUANTIZERS[quantizer], strict=True)
    check_equal(theirs, ours, rounded=name == "conv_net")


def test_library_of_operators_when_both_are_imported_then_defined_once():
    # In whichever order: importing either again must not define an operator a second time.
    for module in ("pt2e_quant.pt2e", "torchao.quantization.pt2e", "pt2e_quant.core.qdq"):
        import_module(module)
    assert torch.ops.quantized_decomposed.quantize_per_tensor.default is not None
    assert torch.ops.torchao.quantize_affine is not None
