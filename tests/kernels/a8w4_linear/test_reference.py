"""a8w4_linear's definition, held to Python's integers, its operator, and where it goes."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.flow.sample import sqnr_db
from pt2e_quant.kernels.a8w4_linear.op import A8w4Linear, cost
from pt2e_quant.kernels.a8w4_linear.pack import pack_halves, run_of, run_sums, unpack_halves
from pt2e_quant.kernels.a8w4_linear.reference import a8w4_linear
from tests.kernels.grouped_models import fused, quantized
from tests.kernels.grouped_operands import a8w4_operands


def by_hand(operands):
    """Sums in Python's integers; each float step rounded by numpy to float32."""
    x, x_scale, x_zero, packed, scale, _, size = operands
    K = x.shape[1]
    run = run_of(size, K)
    weight, scales = unpack_halves(packed, K).tolist(), scale.float().numpy()
    rows = []
    for m, row in enumerate(x.tolist()):
        at = m if len(x_scale) > 1 else 0
        made = []
        for n, column in enumerate(weight):
            total = np.float32(0)
            for start in range(0, K, run):
                pairs = zip(row[start : start + run], column[start : start + run], strict=True)
                whole = sum((a - int(x_zero[at])) * b for a, b in pairs)
                total = total + np.float32(whole) * scales[start // size, n]
            made.append(float(total * x_scale.numpy()[at]))
        rows.append(made)
    return torch.tensor(rows)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_equals_pythons_integers(data, M, N, per_row):
    operands = data.draw(a8w4_operands(M, N, most_k=200, per_row=per_row))
    assert a8w4_linear(*operands).tolist() == by_hand(operands).tolist()


def test_the_operator_is_whole():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-8, 8, (5, 64), dtype=torch.int8, generator=generator)
    operands = (
        torch.randint(-128, 128, (2, 3, 64), dtype=torch.int8, generator=generator),
        torch.rand(6, 1, generator=generator),
        torch.full((6, 1), 4, dtype=torch.int32),
        pack_halves(weight, 32),
        torch.rand(2, 5, generator=generator),
        run_sums(weight, 32),
        32,
    )
    named = {"bias": torch.ones(5), "out_dtype": torch.float16}
    torch.library.opcheck(A8w4Linear, operands, named)
    assert A8w4Linear(*operands, **named).shape == (2, 3, 5)
    assert (
        cost(*(operands[i] for i in (0, 3, 4, 5)), torch.zeros(6, 5)).operations == 2 * 6 * 5 * 64
    )


@pytest.mark.parametrize("name", ["a8w4_g32", "a8w4"])
def test_dynamic_linears_are_one_call_each(name):
    gm, x = quantized(scheme_named(name))
    wanted = copy.deepcopy(gm)(x)
    names, refused = fused(gm)
    assert names.count("a8w4_linear") == 2
    assert refused == {}
    # Sums are exact here and rounded in the q/dq graph, which the second linear may quantize apart.
    assert sqnr_db([wanted], [gm(x)]) > 60
