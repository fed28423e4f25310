"""Functions that no module owns (`torch.log`, `cat`, `F.elu`): ranges, and q/dq of their results.

A `TorchFunctionMode` sees their calls. A call is known by its function and by how many calls of it
came before in the same forward, so that what calibration found is found again.
"""

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.errors import CalibrationError, ConfigError
from pt2e_quant.core.granularity import PerTensor
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.core.qparams import choose_qparams
from pt2e_quant.core.schemes import Scheme, TensorScheme
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor

BOUNDED = MappingProxyType(
    {
        "sigmoid": (0.0, 1.0),
        "hardsigmoid": (0.0, 1.0),
        "softmax": (0.0, 1.0),
        "relu6": (0.0, 6.0),
        "tanh": (-1.0, 1.0),
        "erf": (-1.0, 1.0),
        "sin": (-1.0, 1.0),
        "cos": (-1.0, 1.0),
    }
)
"""Functions whose results have a range by definition: no data is asked about them."""

_MEASURED = frozenset(
    "abs add add_ bmm cat celu clamp concat cumsum div elu exp expm1 gelu hardswish hardtanh "
    "instance_norm layer_norm leaky_relu log log1p log2 log_softmax logaddexp matmul maximum mean "
    "minimum mish mm mul mul_ pow prelu reciprocal relu relu_ rms_norm rsqrt selu silu softplus "
    "sqrt square stack sub sum where __add__ __mul__ __radd__ __rmul__ __rsub__ __sub__ "
    "__truediv__ scaled_dot_product_attention".split()
)
NAMES = _MEASURED | frozenset(BOUNDED)
"""Functions whose float results are quantized."""


class FunctionRanges:
    """Ranges of functions' results, and what quantizes by them.

    Args:
        scheme: static, per tensor, of integers.

    Raises:
        ConfigError: it is another kind of scheme.
    """

    def __init__(self, scheme: TensorScheme) -> None:
        is_static = not scheme.is_dynamic and scheme.format is None
        if not is_static or not isinstance(scheme.granularity, PerTensor):
            raise ConfigError(
                f"functions' results have static integers, one scale a tensor, found {scheme}",
                fix='quantize_(module, "int8", functions=True, calibration_data=…)',
            )
        self.scheme = scheme
        self.seen: dict[str, tuple[float, float]] = {}
        self.qparams: dict[str, tuple[float, int]] = {}

    @classmethod
    def of(cls, module: nn.Module, scheme: Scheme | None) -> "FunctionRanges":
        """Those of a module under a scheme's output.

        Raises:
            ConfigError: the scheme has none.
        """
        if scheme is None or scheme.output is None:
            raise ConfigError(
                "functions are quantized to a scheme's output, and there is none",
                fix='a static scheme, "int8" for example',
            )
        return cls(scheme.output)

    def watching(self) -> TorchFunctionMode:
        """A mode for one forward, whose results widen the ranges."""
        return _Calls(self, is_calibrating=True)

    def choose(self) -> None:
        """Choose qparams by the ranges."""
        low, high = self.scheme.range
        for key, (least, greatest) in self.seen.items():
            ends = torch.tensor([least]), torch.tensor([greatest])
            scale, zero = choose_qparams(
                *ends, quant_min=low, quant_max=high, symmetric=self.scheme.symmetric
            )
            self.qparams[key] = scale.item(), int(zero.item())

    def note(self, key: str, name: str, value: Tensor) -> None:
        """Widen the range of a call.

        Raises:
            CalibrationError: NaN or infinity in a result.
        """
        if name in BOUNDED:
            self.seen[key] = BOUNDED[name]
            return
        if value.numel() == 0:
            return
        low, high = (float(end) for end in torch.aminmax(value.detach()))
        if not (low > -torch.inf and high < torch.inf):
            raise CalibrationError(
                f"NaN or infinity in the result of {name} (call {key})",
                fix="keep it float: quantize functions of finite results",
            )
        known = self.seen.get(key, (low, high))
        self.seen[key] = min(known[0], low), max(known[1], high)

    def quantized(self, key: str, value: Tensor) -> Tensor:
        """A result through q/dq; as it is where calibration saw no such call."""
        found = self.qparams.get(key)
        if found is None:
            return value
        arguments = (*found, *self.scheme.range, info(self.scheme.dtype).storage)
        made: Tensor = DequantizePerTensor(QuantizePerTensor(value, *arguments), *arguments)
        return made


class _Calls(TorchFunctionMode):
    """One forward: counts the calls of each function, and notes or quantizes float results."""

    def __init__(self, ranges: FunctionRanges, *, is_calibrating: bool) -> None:
        super().__init__()
        self.ranges = ranges
        self.is_calibrating = is_calibrating
        self.count: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in NAMES or not isinstance(made, Tensor) or isinstance(made, QuantizedTensor):
            return made
        if not made.is_floating_point():
            return made
        number = self.count.get(name, 0)
        self.count[name] = number + 1
        key = f"{name}_{number}"
        if self.is_calibrating:
            self.ranges.note(key, name, made)
            return made
        return self.ranges.quantized(key, made)


_UNCOMPILED = "a compiler follows no mode that counts the calls of functions"


def install_functions(module: nn.Module, ranges: FunctionRanges | None) -> None:
    """Let a module's forward run under the ranges of its functions."""
    assert ranges is not None  # functions were asked for
    forward = module.forward

    def quantized_forward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.graph_break(msg=_UNCOMPILED)
        with _Calls(ranges, is_calibrating=False):
            return forward(*args, **kwargs)

    module.forward = quantized_forward
