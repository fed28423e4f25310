"""Norms, drawn, and what results of two implementations may differ by."""

import torch
from hypothesis import strategies as st

from tests.kernels.operands import FLOATS

__all__ = ["assert_same_values", "norms"]


@st.composite
def norms(draw, K):
    """Arguments of a norm of rows of K."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(FLOATS))
    found = {
        "kind": draw(st.sampled_from(["layer", "rms"])),
        "eps": draw(st.sampled_from([1e-6, 1e-5, 0.1])),
        "rounds_first": draw(st.booleans()),
        "value_dtype": draw(st.sampled_from(FLOATS)),
    }
    if draw(st.booleans()):
        found["weight"] = (torch.rand(K, generator=generator) + 0.5).to(dtype)
    if draw(st.booleans()):
        found["bias"] = torch.randn(K, generator=generator).to(dtype)
    return found


def assert_same_values(made, wanted):
    """Rows quantized with qparams of their own stand for the same values, but for a step."""
    integers, scale, zero_point = made
    wanted_integers, wanted_scale, wanted_zero = wanted
    # A last bit of bfloat16 in a row's end is 2**-8 of its scale.
    torch.testing.assert_close(scale, wanted_scale, rtol=2**-7, atol=0.0)
    assert (zero_point - wanted_zero).abs().max() <= 2
    real = (integers.float() - zero_point) * scale
    wanted_real = (wanted_integers.float() - wanted_zero) * wanted_scale
    # 2**-7 of the value where the scale differs, and a step beside a tie.
    bound = wanted_scale * 1.01 + wanted_real.abs() * 2**-7
    assert bool(((real - wanted_real).abs() <= bound).all())
