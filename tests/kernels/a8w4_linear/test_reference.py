"""a8w4_linear's definition, held to Python's integers, its operator, and where it goes."""

import copy
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.kernels.a8w4_linear.op import A8w4Linear, cost
from pt2e_quant.kernels.a8w4_linear.pack import pack_halves, run_of, unpack_halves, weight_sums
from pt2e_quant.kernels.a8w4_linear.reference import a8w4_linear, multiply_add
from tests.kernels.grouped_models import fused, quantized
from tests.kernels.grouped_operands import a8w4_operands

floats = st.floats(2.0**-13, 16.0, width=32)


def rounded(exact):
    """A fraction as float32: the nearest, of two as near the even one; it is no subnormal."""
    if exact == 0:
        return np.float32(0)
    exponent = math.frexp(abs(exact.numerator) / exact.denominator)[1]
    # Python rounds fractions to integers half to even.
    step = Fraction(2) ** (exponent - 24)
    return np.float32(float(round(exact / step) * step))


def by_hand(operands):
    """Sums in Python's integers; each float step an exact fraction that is rounded once."""
    x, x_scale, x_zero, packed, scale, weight_sum, size = operands
    K = x.shape[1]
    run = run_of(size, K)
    weight, scales = unpack_halves(packed, K).tolist(), scale.double().tolist()
    rows = []
    for m, row in enumerate(x.tolist()):
        at = m if len(x_scale) > 1 else 0
        made = []
        for n, column in enumerate(weight):
            total = np.float32(0)
            for start in range(0, K, run):
                pairs = zip(row[start : start + run], column[start : start + run], strict=True)
                whole = sum(a * b for a, b in pairs)
                total = rounded(Fraction(float(total)) + whole * Fraction(scales[start // size][n]))
            taken = int(x_zero[at]) * Fraction(weight_sum[n].item())
            total = rounded(Fraction(float(total)) - taken)
            made.append(float(total * x_scale.numpy()[at]))
        rows.append(made)
    return torch.tensor(rows)


@settings(max_examples=40)
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_a8w4_linear_when_inputs_are_drawn_then_equals_pythons_integers(data, M, N, per_row):
    operands = data.draw(a8w4_operands(M, N, most_k=200, per_row=per_row))
    assert a8w4_linear(*operands).tolist() == by_hand(operands).tolist()


@settings(max_examples=60)
@given(st.integers(-(2**18), 2**18), floats, floats, st.integers(-60, 60))
def test_multiply_add_when_terms_differ_widely_then_rounds_once(whole, scale, addend, shift):
    # Sums of very different sizes are where rounding twice would show.
    start = torch.tensor([addend], dtype=torch.float32) * 2.0**shift
    made = multiply_add(torch.tensor([whole]), torch.tensor([scale]), start)
    exact = Fraction(whole) * Fraction(scale) + Fraction(start.item())
    assert made.item() == rounded(exact)


@pytest.mark.parametrize(("sign", "wanted"), [(1, 1 + 2.0**-23), (-1, 1.0)])
def test_multiply_add_when_float64_drops_a_bit_then_it_still_breaks_the_tie(sign, wanted):
    # 1 + 2^-24 is in the middle of two float32 numbers; float64 has no room for 2^-80 beside it.
    middle = torch.tensor([1 + 2.0**-24], dtype=torch.float64)
    made = multiply_add(middle, torch.ones(1), torch.tensor([sign * 2.0**-80]))
    assert made.item() == wanted


def test_operator_when_checked_by_torch_then_is_whole():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-8, 8, (5, 64), dtype=torch.int8, generator=generator)
    operands = (
        torch.randint(-128, 128, (2, 3, 64), dtype=torch.int8, generator=generator),
        torch.rand(6, 1, generator=generator),
        torch.full((6, 1), 4, dtype=torch.int32),
        pack_halves(weight, 32),
        scale := torch.rand(2, 5, generator=generator),
        weight_sums(weight, scale, 32),
        32,
    )
    named = {"bias": torch.ones(5), "out_dtype": torch.float16}
    torch.library.opcheck(A8w4Linear, operands, named)
    assert A8w4Linear(*operands, **named).shape == (2, 3, 5)
    assert (
        cost(*(operands[i] for i in (0, 3, 4, 5)), torch.zeros(6, 5)).operations == 2 * 6 * 5 * 64
    )


@pytest.mark.parametrize("name", ["a8w4_g32", "a8w4"])
def test_dynamic_linears_when_lowered_then_are_one_call_each(name):
    gm, x = quantized(scheme_named(name))
    wanted = copy.deepcopy(gm)(x)
    names, refused = fused(gm)
    assert names.count("a8w4_linear") == 2
    assert refused == {}
    # Sums are exact here and rounded in the q/dq graph, which the second linear may quantize apart.
    assert sqnr_db([wanted], [gm(x)]) > 60
