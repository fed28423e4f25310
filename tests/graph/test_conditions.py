"""Conditions that several op tables state: each stands once, and its text says what it asks."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pt2e_quant.backends import get
from pt2e_quant.graph import conditions, ops
from pt2e_quant.graph.op_table import Constraint
from pt2e_quant.graph.pattern import Op, Var, chain, find_matches, maybe

EXTRAS = {"cpu": "torch", "cuda": "torch", "onnx": "onnx", "xnnpack": "executorch"}
ADD = chain(Op(ops.ADD, Var("x"), Var("y"), name="op"), maybe(ops.CLAMP, "clip"))


def holds(condition: Constraint, function, *inputs) -> bool:
    class Called(nn.Module):
        def forward(self, *inputs):
            return function(*inputs)

    gm = torch.export.export(Called(), inputs).module()
    found = find_matches(gm.graph, [("add", op) for op in ADD] + [("pool", POOL), ("mean", MEAN)])
    return condition.holds(found[0][1])


POOL = Op(ops.ADAPTIVE_AVG_POOL2D, Var("x"), name="op")
MEAN = Op(ops.MEAN, Var("x"), name="op")
X = torch.randn(1, 2, 4, 4)


@pytest.mark.parametrize(
    ("name", "function", "expected"),
    [
        ("ADDS_UNSCALED", lambda x: torch.add(x, x, alpha=2), False),
        ("ADDS_UNSCALED", lambda x: torch.add(x, x).clamp(0, 1), True),
        ("LIMITS_ARE_LITERALS", lambda x: (x + x).clamp(min=0), True),
        ("FLOAT_OPERANDS", lambda x: x + x, True),
        ("FLOAT_OPERANDS", lambda x: x.double() + x.double(), False),
        ("FLOAT_OPERANDS", lambda x: x + 1.5, False),
        ("TENSOR_OPERANDS", lambda x: x + x, True),
        ("TENSOR_OPERANDS", lambda x: x + 1.5, False),
        ("BATCHED_2D", lambda x: x + x, True),
        ("BATCHED_1D", lambda x: x + x, False),
        ("GLOBAL_MEAN", lambda x: x.mean((-1, 2)), True),
        ("GLOBAL_MEAN", lambda x: x.mean((1, 2)), False),
        ("GLOBAL_MEAN", lambda x: x.mean((2, 3), dtype=torch.float64), False),
        ("POOLS_TO_ONE", lambda x: F.adaptive_avg_pool2d(x, 1), True),
        ("POOLS_TO_ONE", lambda x: F.adaptive_avg_pool2d(x, (1, 2)), False),
    ],
)
def test_condition_when_asked_of_a_call_then_as_its_text_says(name, function, expected):
    assert holds(getattr(conditions, name), function, X) is expected


def test_tables_when_entries_of_two_say_the_same_then_it_is_one_condition():
    asked: dict[str, set[tuple[str, str]]] = {}
    for name, package in EXTRAS.items():
        pytest.importorskip(package)
        for row in get(name).table:
            for constraint in row.constraints:
                at = constraint.holds.__module__, constraint.holds.__qualname__
                asked.setdefault(constraint.text, set()).add(at)
    assert {text: found for text, found in asked.items() if len(found) > 1} == {}
