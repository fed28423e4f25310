"""Values of two results compared: floats by SQNR, all else for equality."""

import math
import re

import pytest
import torch
from torch import Tensor, nn

from pt2e_quant.backends.compare_results import compare, name_results
from pt2e_quant.core.read_capture import rebuild_capture

INF = math.inf
MASK = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("expected", "found", "wrong"),
    [
        (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 3]), 0),
        (torch.tensor([1, 2, 3]), torch.tensor([1, 3, 2]), 2),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1),
        (3, 3, 0),
        (3, torch.tensor(4), 1),
        (None, None, 0),
        ("text", "other", 1),
    ],
)
def test_compare_when_no_float_then_differing_elements_are_counted(expected, found, wrong):
    difference = compare(expected, found)
    assert (difference.wrong, difference.ratio_db, difference.problem) == (wrong, INF, "")


def test_compare_when_floats_then_their_sqnr():
    x = torch.ones(1000)
    assert compare(x, x + 0.01).ratio_db == pytest.approx(40, abs=0.01)
    assert compare(1.0, 1.01).ratio_db == pytest.approx(40, abs=0.01)


@pytest.mark.parametrize(
    ("expected", "found", "problem"),
    [
        (torch.ones(2), torch.ones(3), r"float32\[3\] instead of float32\[2\]"),
        (torch.ones(2), torch.ones(2).double(), r"float64\[2\] instead of float32\[2\]"),
        (torch.ones(2), 1.0, "a float instead of a tensor"),
        (torch.ones(2), torch.tensor([1.0, INF]), "infinity in other places"),
        (torch.tensor([1.0, -INF]), torch.ones(2), "infinity in other places"),
        (torch.tensor([1.0, math.nan]), torch.ones(2), "NaN in other places"),
        (torch.ones(2), torch.tensor([1.0, math.nan]), "NaN in other places"),
    ],
)
def test_compare_when_two_values_cannot_be_compared_then_says_why(expected, found, problem):
    difference = compare(expected, found)
    assert math.isnan(difference.ratio_db)
    assert re.fullmatch(problem, difference.problem)


def test_compare_when_infinities_are_written_as_the_largest_float_then_equal():
    mask = torch.tensor([0.0, MASK, 1.0])
    assert compare(mask, torch.tensor([0.0, -INF, 1.0])).ratio_db == INF


class Named(nn.Module):
    def forward(self, x: Tensor) -> dict[str, object]:
        return {"logits": x + 1, "states": (x, x + 2)}


def test_results_when_named_then_by_their_place():
    ep = torch.export.export(Named(), (torch.ones(2),))
    capture = rebuild_capture(ep.module())
    assert [*name_results(capture, [1, 2, 3])] == [
        "result['logits']",
        "result['states'][0]",
        "result['states'][1]",
    ]
    assert [*name_results(capture, [1])] == ["result leaf 0"]
