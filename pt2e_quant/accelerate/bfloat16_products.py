"""Products of float weights with small differences, in bfloat16 where the CPU has such products.

A CPU with AVX512-BF16 or AMX multiplies bfloat16 at twice the rate of float32 or more. Rounding
a difference to bfloat16 changes it by at most 2**-8 of itself, however large the values are that it
is a difference of.
"""

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.accelerate.packed_convolutions import PackedConvolutions
from pt2e_quant.accelerate.patch import Patch

PATCH = Patch(
    name="bfloat16_products",
    saves="a ResNet-50 at one image takes half as long where `sensitivity` runs it",
    versions={"torch": "2.13"},
)


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for products of bfloat16."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)


class BFloat16Products:
    """Convolutions and linears of bfloat16[...] differences; weights are rounded once."""

    def __init__(self) -> None:
        self.weights: dict[Hashable, Tensor] = {}
        self.convolutions = PackedConvolutions()
        self.is_on = PATCH.is_on() and self.convolutions.is_on and multiplies_bfloat16()

    def conv2d(
        self,
        key: Hashable,
        difference: Tensor,
        weight: Tensor,
        stride: Sequence[int] = (1,),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        groups: int = 1,
    ) -> Tensor | None:
        """Return what a convolution makes of a difference; None where it has no fast kernel.

        Args:
            key: of the weight.
            difference: bfloat16[N, C, H, W].
            weight: float[K, C, R, S].
            stride: one or two numbers, as of the next two.
            padding: of zeros.
            dilation: of the weight.
            groups: of channels.
        """
        rounded = self._rounded(key, weight)
        rest: Any = (stride, padding, dilation, groups)
        return self.convolutions.run(key, difference, rounded, None, *rest)

    def linear(self, key: Hashable, difference: Tensor, weight: Tensor) -> Tensor:
        """Return bfloat16[..., N] of a difference bfloat16[..., K] and a weight float[N, K]."""
        return torch.nn.functional.linear(difference, self._rounded(key, weight))

    def _rounded(self, key: Hashable, weight: Tensor) -> Tensor:
        if key not in self.weights:
            self.weights[key] = weight.detach().bfloat16()
        return self.weights[key]
