import json

import pytest

from pt2e_quant.backends.profile import NodeTime, Profile, WorkKind
from pt2e_quant.kernels.cost import Cost


def operator(node, kind, time_us, kernel="k"):
    return NodeTime(
        node=node,
        module="m",
        kernel=kernel,
        is_fused=False,
        kind=kind,
        cost=Cost(bytes=8, operations=0),
        time_us=time_us,
    )


MADE = Profile(
    (
        operator("a", WorkKind.CONVERT, 10.0),
        operator("b", WorkKind.INTEGER, 60.0),
        operator("c", WorkKind.CONVERT, 30.0, kernel="q"),
    ),
    runtime="a runtime",
    call_us=120.0,
)


def test_profile_when_made_then_sums_by_kind_and_kernel():
    assert MADE.time_us == 100.0
    assert MADE.by_kind() == {WorkKind.INTEGER: 60.0, WorkKind.CONVERT: 40.0}
    assert MADE.by_kernel() == {"k": 70.0, "q": 30.0}
    assert [node.node for node in MADE.worst(2)] == ["b", "c"]
    assert MADE.share(MADE.nodes[1]) == pytest.approx(0.6)


def test_figure_when_a_node_has_several_operators_then_it_stands_by_their_sum():
    pytest.importorskip("plotly")
    several = Profile((*MADE.nodes, operator("a", WorkKind.FLOAT, 55.0)))
    assert several.by_node() == {"a": 65.0, "b": 60.0, "c": 30.0}
    made = several.figure(2)
    assert made.layout.yaxis.categoryarray == ("b ", "a ")
    bars = [(bar.name, at, us) for bar in made.data for at, us in zip(bar.y, bar.x, strict=True)]
    assert sorted(bars) == [("convert", "a ", 10.0), ("float", "a ", 55.0), ("integer", "b ", 60.0)]


def test_profile_when_printed_then_longest_first_with_the_shares_of_kinds():
    text = str(MADE)
    assert "integer 60 %, convert 40 %" in text
    assert "a call takes 120 us" in text
    assert text.index("│ b ") < text.index("│ c ") < text.index("│ a ")


def test_profile_when_to_json_then_every_operator_and_the_sums():
    found = json.loads(MADE.to_json())
    assert found["by_kind_us"] == {"integer": 60.0, "convert": 40.0}
    assert [node["kind"] for node in found["nodes"]] == ["convert", "integer", "convert"]
    assert found["runtime"] == "a runtime"


def test_profile_when_without_operators_then_prints_all_the_same():
    assert Profile(()).by_kind() == {}
    assert "0 us in operators" in str(Profile(()))
