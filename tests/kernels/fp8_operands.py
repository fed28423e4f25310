"""Operands of fp8_linear, drawn: the greatest codes and subnormal ones are as likely as others."""

import torch
from hypothesis import strategies as st

from tests.kernels.operands import scales

__all__ = ["fp8_operands"]


@st.composite
def _codes(draw, shape):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = draw(st.sampled_from([2.0**-8, 1.0, 200.0]))
    drawn = torch.randn(shape, generator=generator) * size
    if draw(st.booleans()):
        drawn = drawn.sign() * 448
    return drawn.clamp(-448, 448).to(torch.float8_e4m3fn)


@st.composite
def fp8_operands(draw, M, N, K):
    """The tensors of fp8_linear before its epilogue: scales of rows or of the whole."""
    per_row, per_channel = draw(st.booleans()), draw(st.booleans())
    return (
        draw(_codes((M, K))),
        draw(scales(M if per_row else 1, 0.05)),
        draw(_codes((N, K))),
        draw(scales(N if per_channel else 1, 0.05)),
    )
