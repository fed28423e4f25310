"""The size of a weight under a scheme, as convert stores it: codes and qparams."""

import math
from collections.abc import Sequence

from pt2e_quant.core.formats.blocks import block_lengths, grid_shape
from pt2e_quant.core.formats.number_formats import CodeBook
from pt2e_quant.core.granularity import PerGroup, PerTensor
from pt2e_quant.core.packing import packed_shape
from pt2e_quant.core.schemes import TensorScheme


def bits_per_weight(scheme: TensorScheme, shape: Sequence[int] = (4096, 4096)) -> float:
    """Bits that one value of a weight takes, scales included.

    >>> from pt2e_quant.core.scheme_names import scheme_named
    >>> bits_per_weight(scheme_named("mxfp4").weight), bits_per_weight(scheme_named("nf4").weight)
    (4.25, 4.500030517578125)
    """
    return stored_bytes(scheme, shape) * 8 / math.prod(shape)


def stored_bytes(scheme: TensorScheme, shape: Sequence[int]) -> int:
    """Bytes of all the constants that a weight of a shape becomes.

    Zero_points of an affine scheme are counted with the bits of its integers; they are stored in
    the bits that their own values need, which may be less.
    """
    grid = grid_shape(shape, block_lengths(scheme.granularity, len(shape)))
    codes = math.prod(_packed(shape, scheme.bits))
    return codes + _of_scales(scheme, grid) + _of_zero_points(scheme, grid)


def _packed(shape: Sequence[int], bits: int) -> tuple[int, ...]:
    return packed_shape(shape, bits) if bits < 8 else (math.prod(shape) * bits // 8,)


def _of_scales(scheme: TensorScheme, grid: Sequence[int]) -> int:
    count, form = math.prod(grid), scheme.scales
    table = 0
    if isinstance(scheme.format, CodeBook):
        if scheme.format.is_fitted:
            return count * (1 << scheme.bits) * form.dtype.itemsize
        table = len(scheme.format.values) * 4
    if form.double_group is not None:
        return table + count + 4 * math.ceil(count / form.double_group)
    if scheme.is_plain and scheme.granularity == PerTensor():
        return 0  # numbers in the graph
    return table + count * form.dtype.itemsize + (4 if form.in_tensor_units else 0)


def _of_zero_points(scheme: TensorScheme, grid: Sequence[int]) -> int:
    if scheme.format is not None:
        return 0
    if not scheme.is_plain:
        is_kept = not scheme.symmetric or scheme.range[0] >= 0
        bits = scheme.bits if scheme.bits < 8 else 32
        return math.prod(_packed(grid, bits)) if is_kept else 0
    if scheme.granularity == PerTensor():
        return 0
    if scheme.bits == 8 and not isinstance(scheme.granularity, PerGroup):
        return math.prod(grid) * 8  # int64, as ExecuTorch's portable operator reads them
    channels = grid if isinstance(scheme.granularity, PerGroup) else [math.prod(grid)]
    return math.prod(_packed(channels, 1 if scheme.symmetric else scheme.bits))
