"""Weights as the kernels read them: channels innermost, and the sums that correct zero points."""

import torch
from torch import Tensor


def pack_weight(weight: Tensor, groups: int) -> Tensor:
    """Weights with the axis innermost that loads run along; nothing is lost or added.

    Args:
        weight: int8[O, C / groups, KH, KW].
        groups: of channels.

    Returns:
        int8[O, KH, KW, C / groups], contiguous; of a depthwise convolution int8[KH, KW, O].
    """
    if _is_depthwise(weight, groups):
        return weight.squeeze(1).permute(1, 2, 0).contiguous()
    return weight.permute(0, 2, 3, 1).contiguous()


def unpack_weight(packed: Tensor) -> Tensor:
    """The inverse of `pack_weight`: int8[O, C / groups, KH, KW]."""
    if packed.dim() == 3:
        return packed.permute(2, 0, 1).unsqueeze(1).contiguous()
    return packed.permute(0, 3, 1, 2).contiguous()


def fill_channels(packed: Tensor, channels: int) -> Tensor:
    """A packed weight with input channels of zeros behind its own, which add nothing to any sum.

    Args:
        packed: int8[O, KH, KW, C] of `pack_weight`.
        channels: at least C.

    Returns:
        int8[O, KH, KW, channels]; its `window_sums` are the same.
    """
    return torch.nn.functional.pad(packed, (0, channels - packed.shape[-1]))


def window_sums(weight: Tensor) -> Tensor:
    """The sums over all taps before each place: a summed-area table of the window.

    The taps [a, b) x [c, d) of output channel o sum to T[b, d, o] - T[a, d, o] - T[b, c, o] +
    T[a, c, o]: what a zero point adds where the rest of the window hangs over the border.

    Args:
        weight: int8[O, C / groups, KH, KW].

    Returns:
        int32[KH + 1, KW + 1, O]; row 0 and column 0 are zeros.
    """
    taps = weight.sum(dim=1, dtype=torch.int32).permute(1, 2, 0)
    sums = taps.cumsum(0, dtype=torch.int32).cumsum(1, dtype=torch.int32)
    return torch.nn.functional.pad(sums, (0, 0, 1, 0, 1, 0)).contiguous()


def _is_depthwise(weight: Tensor, groups: int) -> bool:
    return groups > 1 and weight.shape[1] == 1
