"""The rows of a comparison: their order, and what is written of them."""

import json
import math

import pytest

from pt2e_quant.analysis.comparison import Comparison, NodeError, Part


def row(node, part=Part.ACTIVATION, **given):
    facts = {"sqnr_db": 30.0, "cosine": 1.0, "max_error": 0.1} | given
    return NodeError(node=node, part=part, tensor=node, operator="aten.linear", **facts)


@pytest.fixture
def found():
    rows = (
        row("fc", Part.WEIGHT, worst_channel_db=20.0),
        row("fc", own_sqnr_db=25.0, own_channel_db=40.0),
        row("relu", own_sqnr_db=35.0, own_channel_db=5.0),
        row("add", excess_db=math.inf),
    )
    return Comparison(reference="a", other="b", nodes=rows, batches=1, sqnr_db=math.inf)


def test_cost_when_own_figures_are_known_then_the_lower_one_else_the_excess(found):
    assert [r.cost_db for r in found] == [20.0, 25.0, 5.0, math.inf]


def test_worst_when_a_node_has_two_rows_then_it_is_named_once_by_the_worse(found):
    assert [(r.node, r.part) for r in found.worst(2)] == [
        ("relu", Part.ACTIVATION),
        ("fc", Part.WEIGHT),
    ]
    assert found.node("fc").part is Part.ACTIVATION


def test_json_when_a_figure_is_infinite_then_null(found):
    data = json.loads(found.to_json())
    assert data["sqnr_db"] is None
    assert data["nodes"][3]["cost_db"] is None
    assert data["version"] == 1


def test_table_when_printed_then_the_worst_stands_first(found):
    text = str(found)
    assert text.index("relu") < text.index("fc")
