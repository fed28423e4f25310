"""The table of what each group costs."""

import json
import math

from pt2e_quant.analysis.group_costs import GroupCost, Method, Sensitivity


def table():
    groups = tuple(
        GroupCost(group=name, operator="aten.linear", cost=cost)
        for name, cost in (("a", 0.1), ("b", math.inf), ("c", 0.5))
    )
    return Sensitivity(method=Method.EXACT, recipe="int8", groups=groups, batches=1)


def test_worst_when_asked_for_then_the_highest_cost_is_first():
    assert [row.group for row in table().worst(2)] == ["b", "c"]
    assert table().group("c").cost == 0.5
    assert table().group("d") is None


def test_json_when_written_then_every_group_is_there_and_infinity_is_null():
    data = json.loads(table().to_json())
    assert [row["cost"] for row in data["groups"]] == [0.1, None, 0.5]
    assert (data["version"], data["method"], data["recipe"]) == (1, "exact", "int8")
    assert str(table()).index("│ b") < str(table()).index("│ c")
