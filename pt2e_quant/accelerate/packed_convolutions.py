"""Float 2d convolutions that are run many times with one weight: it is packed once.

torch's eager convolution brings a weight into oneDNN's order in every call. At one image a call
that is half of the time of a ResNet-50.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.accelerate.patch import Patch

PATCH = Patch(
    name="packed_convolutions",
    saves="a ResNet-50 at one image takes 0.6 times as long where `sensitivity` runs it",
    versions={"torch": "2.13"},
)


class PackedConvolutions:
    """Weights of convolutions in oneDNN's order; it takes their memory once more."""

    def __init__(self) -> None:
        self.packed: dict[Hashable, Tensor] = {}
        onednn: Any = torch.backends.mkldnn
        has_operator = hasattr(torch._C._nn, "mkldnn_reorder_conv2d_weight")
        self.is_on = PATCH.is_on() and has_operator and onednn.is_available() and onednn.enabled

    def run(
        self,
        key: Hashable,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Sequence[int] = (1,),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        groups: int = 1,
    ) -> Tensor | None:
        """Equal to `aten.conv2d` up to rounding, with the channels last in memory.

        All tensors may be bfloat16 instead.

        None where it is to be called itself.

        Args:
            key: of the weight: where it is known from another call its values are not read.
            x: float[N, C, H, W].
            weight: float[K, C / groups, R, S].
            bias: float[K].
            stride: one or two numbers, as of the next two.
            padding: of zeros.
            dilation: of the weight.
            groups: of channels.
        """
        is_plain = x.dim() == 4 and groups == 1 and not torch.is_grad_enabled()
        if not (self.is_on and is_plain and _is_float(x) and weight.dtype is x.dtype):
            return None
        numbers = [_pair(value) for value in (padding, stride, dilation)]
        at = (key, x.shape)
        if at not in self.packed:
            reorder: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
            self.packed[at] = reorder(weight.detach().to_mkldnn(), *numbers, groups, [*x.shape])
        convolve: Any = torch.ops.mkldnn._convolution_pointwise
        found: Tensor = convolve(x, self.packed[at], bias, *numbers, groups, "none", [], "")
        return found


def channels_first(value: Any) -> Any:
    """A feature map in the order that views of a captured program are made for."""
    is_last = isinstance(value, Tensor) and value.dim() == 4 and not value.is_contiguous()
    if is_last and value.is_contiguous(memory_format=torch.channels_last):
        return value.contiguous()
    return value


def _is_float(value: Tensor) -> bool:
    return value.dtype in (torch.float32, torch.bfloat16) and value.device.type == "cpu"


def _pair(value: Sequence[int]) -> list[int]:
    return [*value] * 2 if len(value) == 1 else [*value]
