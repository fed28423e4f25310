"""Quantizers of other backends through torchao's own PT2E and through ours: the same result."""

from collections import Counter
from importlib import import_module

import pytest
import torch

pytest.importorskip("torchao")

from pt2e_flows import both
from pt2e_models import MODELS

_TORCHAO = "torchao.quantization.pt2e.quantizer"


def _global(module, quantizer, config, **kwargs):
    module = pytest.importorskip(module, exc_type=ImportError)
    return lambda: getattr(module, quantizer)().set_global(getattr(module, config)(**kwargs))


def _plain(module, quantizer):
    module = pytest.importorskip(module, exc_type=ImportError)
    return getattr(module, quantizer)


QUANTIZERS = {
    "x86": lambda: _global(
        f"{_TORCHAO}.x86_inductor_quantizer",
        "X86InductorQuantizer",
        "get_default_x86_inductor_quantization_config",
    ),
    "arm_inductor": lambda: _global(
        f"{_TORCHAO}.arm_inductor_quantizer",
        "ArmInductorQuantizer",
        "get_default_arm_inductor_quantization_config",
    ),
    "xpu": lambda: _global(
        f"{_TORCHAO}.xpu_inductor_quantizer",
        "XPUInductorQuantizer",
        "get_default_xpu_inductor_quantization_config",
    ),
    "vulkan": lambda: _global(
        "executorch.backends.vulkan.quantizer.vulkan_quantizer",
        "VulkanQuantizer",
        "get_symmetric_quantization_config",
    ),
    "cadence": lambda: _plain(
        "executorch.backends.cadence.aot.quantizer.quantizer", "CadenceDefaultQuantizer"
    ),
}
# Batch norm is folded in another order of operations.
ROUNDED = {"conv_bn_relu"}


def counts(outcome):
    found = Counter(outcome.counts)
    del found["_guards_fn"]
    return found


@pytest.mark.filterwarnings("ignore")  # torchao's and ExecuTorch's own modules, at import
@pytest.mark.parametrize(
    "name", ["two_linears", "conv_bn_relu", "residual_relu", "cat", "attention"]
)
@pytest.mark.parametrize("backend", QUANTIZERS)
def test_foreign_quantizer_when_run_then_as_torchao_converts(backend, name):
    quantizer = QUANTIZERS[backend]()
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    theirs, ours = both(model, inputs, quantizer)
    assert counts(ours) == counts(theirs)
    if name not in ROUNDED:
        assert ours.qparams == theirs.qparams
    for a, b in zip(ours.outputs, theirs.outputs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 if name in ROUNDED else 0)


def test_library_of_operators_when_both_are_imported_then_defined_once():
    # In whichever order: importing either again must not define an operator a second time.
    for module in ("pt2e_quant.pt2e", "torchao.quantization.pt2e", "pt2e_quant.core.qdq"):
        import_module(module)
    assert torch.ops.quantized_decomposed.quantize_per_tensor.default is not None
    assert torch.ops.torchao.quantize_affine is not None
