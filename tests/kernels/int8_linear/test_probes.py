"""The trial products that say whether 8-bit sums are exact here: of every sign that saturates."""

import pytest
import torch

from pt2e_quant.kernels.int8_linear import multiply_cpu


@pytest.mark.parametrize("hits_positive", [True, False])
@pytest.mark.parametrize("wrong_rows", [1, 16])
def test_int_mm_is_exact_when_a_product_saturates_for_some_operands_then_is_false(
    monkeypatch, hits_positive, wrong_rows
):
    """As oneDNN does without VNNI, where only activations near one end saturate."""
    exact = torch._int_mm

    def saturating(x, weight):
        is_hit = (x[0, 0] > 0) == hits_positive and len(x) == wrong_rows
        return exact(x, weight) // (2 if is_hit else 1)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    assert not multiply_cpu.int_mm_is_exact.__wrapped__()
