"""Sums that int32 does not hold: such operators stay float, with the reason."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import AnnotationError
from pt2e_quant.graph.sum_lengths import LONGEST_SUM

CASES = {
    "linear": lambda terms: (nn.Linear(terms, 1), (1, terms)),
    "conv": lambda terms: (nn.Conv2d(terms, 1, 1), (1, terms, 1, 1)),
}


@pytest.mark.parametrize(
    ("backend", "recipe", "name"),
    [
        ("xnnpack", "int8", "linear"),
        ("xnnpack", "int8", "conv"),
        ("xnnpack", "int8_dynamic", "linear"),
        ("onnx", "int8", "linear"),
        ("onnx", "int8", "conv"),
        ("onnx", "int8_dynamic", "linear"),
    ],
)
def test_annotate_when_a_sum_may_leave_int32_then_float(backend, recipe, name):
    pytest.importorskip({"xnnpack": "executorch", "onnx": "onnxruntime"}[backend])

    def prepared(terms):
        model, shape = CASES[name](terms)
        program = torch.export.export(model.eval(), (torch.zeros(shape),))
        return pq.prepare_pt2e(program, pq.backends.get(backend).quantizer(recipe))

    prepared(LONGEST_SUM)
    with pytest.raises(AnnotationError, match=f"at most {LONGEST_SUM} products in a sum"):
        prepared(LONGEST_SUM + 1)


def test_longest_sum_when_products_are_largest_then_just_fits_int32():
    largest = 255 * 128
    assert LONGEST_SUM * largest <= torch.iinfo(torch.int32).max < (LONGEST_SUM + 1) * largest
