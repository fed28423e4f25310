"""Operands of products with 4-bit weights in groups, drawn."""

import torch
from hypothesis import strategies as st

from pt2e_quant.kernels.a8w4_linear.pack import half_of, pack_halves, weight_sums
from pt2e_quant.kernels.int4_linear.pack import pack_codes
from tests.kernels.operands import FLOATS, float_rows, integers, scales

__all__ = ["a8w4_operands", "group_sizes", "int4_operands"]


@st.composite
def group_sizes(draw, most_k, sizes=(32, 64, 128, 256)):
    """K and a group size of it: of a row, or one of `sizes` that fits."""
    fitting = [size for size in sizes if size <= most_k]
    size = draw(st.sampled_from([0, *fitting]))
    if size == 0:
        K = draw(st.integers(1, most_k))
        return K, K
    return size * draw(st.integers(1, most_k // size)), size


@st.composite
def int4_operands(draw, M, N, most_k):
    """The tensors of int4_linear before its epilogue."""
    K, size = draw(group_sizes(most_k))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = (torch.rand(K // size, N, generator=generator) + 0.1) * 0.1
    zero_point = draw(integers((K // size, N), 0, 15, torch.uint8))
    return (
        draw(float_rows((M, K))),
        pack_codes(draw(integers((N, K), 0, 15, torch.uint8))),
        scale.to(draw(st.sampled_from(FLOATS))),
        zero_point if draw(st.booleans()) else None,
        size,
    )


@st.composite
def a8w4_operands(draw, M, N, most_k, *, per_row):
    """The tensors of a8w4_linear before its epilogue."""
    K, size = draw(group_sizes(most_k))
    weight = draw(integers((N, K), -8, 7))
    count = M if per_row else 1
    scale = draw(scales((K // size, N), 0.1)).to(draw(st.sampled_from(FLOATS)))
    return (
        draw(integers((M, K))),
        draw(scales(count, 0.05)),
        draw(integers((count,), dtype=torch.int32)),
        pack_halves(weight, half_of(size, K)),
        scale,
        weight_sums(weight, scale, size),
        size,
    )
