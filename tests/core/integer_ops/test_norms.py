"""Roots in integers against real ones."""

import math

import torch

from pt2e_quant.core.integer_ops.norms import square_root


def test_square_root_when_values_are_63_bit_then_exact():
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(0, 2**62, (2000,), generator=generator)
    values = wide >> torch.randint(0, 62, (2000,), generator=generator)
    roots = values.double().sqrt().long().clamp(max=2**31 - 1)
    values = torch.cat([values, roots**2, (roots**2 - 1).clamp(min=0), torch.tensor([2**63 - 1])])
    assert square_root(values).tolist() == [math.isqrt(v) for v in values.tolist()]
