"""Quantizers of other packages and of ExecuTorch's vendors, and two networks to try them on."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

_VENDORS = "executorch.backends"
_TORCHAO = "torchao.quantization.pt2e.quantizer"


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.b = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.c = nn.Conv2d(8, 8, 1)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        y = self.pool(torch.relu(self.bn(self.a(x))))
        y = torch.relu(self.c(self.b(y)) + y)
        return self.head(self.mean(y).flatten(1))


class Block(nn.Module):
    """A transformer block of two heads with attention written out."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        for name in "qkvo":
            self.add_module(name, nn.Linear(width, width))
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        n, tokens, width = x.shape
        y = self.norm_1(x)
        q, k, v = (
            layer(y).reshape(n, tokens, 2, width // 2).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = torch.softmax(q @ k.transpose(-2, -1) * (width // 2) ** -0.5, -1)
        x = x + self.o((scores @ v).transpose(1, 2).reshape(n, tokens, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


NETWORKS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "conv_net": lambda: (ConvNet().eval(), (_noise(1, 3, 8, 8),)),
    "block": lambda: (Block().eval(), (_noise(1, 6, 16),)),
}


def import_or_skip(module: str) -> Any:
    """A module, or a skip that says what is missing: an SDK's absence has many exceptions."""
    try:
        return import_module(module)
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"{module}: {error}")


def xnnpack(**config: Any) -> Any:
    module = import_or_skip(f"{_VENDORS}.xnnpack.quantizer.xnnpack_quantizer")
    return module.XNNPACKQuantizer().set_global(module.get_symmetric_quantization_config(**config))


def xnnpack_by_module(method: str, *what: Any) -> Any:
    """Only what rules select; a name that one network lacks selects nothing there."""
    module = import_or_skip(f"{_VENDORS}.xnnpack.quantizer.xnnpack_quantizer")
    quantizer = module.XNNPACKQuantizer()
    for selected in what:
        getattr(quantizer, method)(
            selected, module.get_symmetric_quantization_config(is_per_channel=True)
        )
    return quantizer


def tosa(config: str = "get_symmetric_quantization_config", profile: str = "TOSA-1.0+INT") -> Any:
    spec = import_or_skip(f"{_VENDORS}.arm.tosa.compile_spec").TosaCompileSpec(profile)
    module = import_or_skip(f"{_VENDORS}.arm.quantizer")
    return module.TOSAQuantizer(spec).set_global(getattr(module, config)())


def ethos_u_spec() -> Any:
    return import_or_skip(f"{_VENDORS}.arm.ethosu").EthosUCompileSpec(
        "ethos-u55-128",
        system_config="Ethos_U55_High_End_Embedded",
        memory_mode="Shared_Sram",
    )


def ethos_u() -> Any:
    module = import_or_skip(f"{_VENDORS}.arm.quantizer")
    return module.EthosUQuantizer(ethos_u_spec()).set_global(
        module.get_symmetric_quantization_config()
    )


def core_ml() -> Any:
    config = import_or_skip("coremltools.optimize.torch.quantization").LinearQuantizerConfig
    module = import_or_skip(f"{_VENDORS}.apple.coreml.quantizer")
    return module.CoreMLQuantizer(
        config.from_dict(
            {
                "global_config": {
                    "quantization_scheme": "symmetric",
                    "milestones": [0, 0, 10, 10],
                    "activation_dtype": "quint8",
                    "weight_dtype": "qint8",
                    "weight_per_channel": True,
                }
            }
        )
    )


def vulkan() -> Any:
    module = import_or_skip(f"{_VENDORS}.vulkan.quantizer.vulkan_quantizer")
    return module.VulkanQuantizer().set_global(module.get_symmetric_quantization_config())


def inductor(name: str, class_name: str, **config: Any) -> Any:
    module = import_or_skip(f"{_TORCHAO}.{name}_inductor_quantizer")
    made = getattr(module, f"get_default_{name}_inductor_quantization_config")(**config)
    return getattr(module, class_name)().set_global(made)


def testing_xnnpack(**config: Any) -> Any:
    module = import_or_skip("torchao.testing.pt2e._xnnpack_quantizer")
    return module.XNNPACKQuantizer().set_global(module.get_symmetric_quantization_config(**config))


def plain(module: str, class_name: str) -> Any:
    return getattr(import_or_skip(f"{_VENDORS}.{module}"), class_name)()


def nxp() -> Any:
    module = import_or_skip(f"{_VENDORS}.nxp.quantizer.neutron_quantizer")
    target = import_or_skip(f"{_VENDORS}.nxp.backend.neutron_target_spec")
    return module.NeutronQuantizer(target.NeutronTargetSpec("imxrt700"))


QUANTIZERS: dict[str, Callable[[], Any]] = {
    "xnnpack_per_tensor": xnnpack,
    "xnnpack_per_channel": lambda: xnnpack(is_per_channel=True),
    "xnnpack_dynamic": lambda: xnnpack(is_dynamic=True),
    "xnnpack_dynamic_per_channel": lambda: xnnpack(is_per_channel=True, is_dynamic=True),
    "xnnpack_module_name": lambda: xnnpack_by_module("set_module_name", "b", "head", "up"),
    "xnnpack_module_type": lambda: xnnpack_by_module("set_module_type", nn.Linear),
    "tosa": tosa,
    "tosa_a16w8": lambda: tosa("get_symmetric_a16w8_quantization_config", "TOSA-1.0+INT+int16"),
    "ethos_u": ethos_u,
    "cortex_m": lambda: plain("cortex_m.quantizer.quantizer", "CortexMQuantizer"),
    "core_ml": core_ml,
    "vulkan": vulkan,
    "cadence": lambda: plain("cadence.aot.quantizer.quantizer", "CadenceDefaultQuantizer"),
    "samsung": lambda: plain("samsung.quantizer", "EnnQuantizer"),
    "nxp": nxp,
    "openvino": lambda: plain("openvino.quantizer.quantizer", "OpenVINOQuantizer"),
    "qualcomm": lambda: plain("qualcomm.quantizer.quantizer", "QnnQuantizer"),
    "x86_inductor": lambda: inductor("x86", "X86InductorQuantizer"),
    "x86_inductor_dynamic": lambda: inductor("x86", "X86InductorQuantizer", is_dynamic=True),
    "arm_inductor": lambda: inductor("arm", "ArmInductorQuantizer"),
    "xpu_inductor": lambda: inductor("xpu", "XPUInductorQuantizer"),
    "testing_xnnpack": lambda: testing_xnnpack(is_per_channel=True),
    "testing_xnnpack_dynamic": lambda: testing_xnnpack(is_per_channel=True, is_dynamic=True),
}
