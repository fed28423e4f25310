"""Embedding tables, drawn."""

import torch
from hypothesis import strategies as st

from pt2e_quant.core.packing import pack
from tests.kernels.operands import integers, scales

__all__ = ["tables"]


@st.composite
def tables(draw):
    """The arguments of embedding_gather from table to is_signed; the codes, one per element."""
    V, groups = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    K = groups * draw(st.integers(1, 20))
    bits, is_signed = draw(st.sampled_from([(8, True), (4, True), (4, False)]))
    low = -(1 << (bits - 1)) if is_signed else 0
    dtype = torch.int8 if is_signed else torch.uint8
    codes = draw(integers((V, K), low=low, high=low + (1 << bits) - 1, dtype=dtype))
    table = codes
    if bits == 4:
        table = pack(codes, torch.int4 if is_signed else torch.uint4)
    scale = draw(scales(V * groups, 0.1)).reshape(V, groups)
    zero_point = None
    if draw(st.booleans()):
        zero_point = draw(integers((V, groups), low=-128, high=127, dtype=torch.int32))
    shape = draw(st.sampled_from([(5,), (2, 3), (), (1, 1)]))
    indices = draw(integers(shape, low=0, high=V - 1, dtype=torch.int64))
    return (table, scale, zero_point, indices, K, bits, is_signed), codes
