import sys

import pytest

from pt2e_quant.core.errors import MissingExtraError
from pt2e_quant.core.provenance import SizeRecord
from pt2e_quant.flow.report.page.plot import SCALE, figure, reversed_scale, size_treemap


def record(name, size, elements=8):
    return SizeRecord(
        name=name, dtype="int8", elements=elements, size_before=4 * size, size_after=size, qparams=4
    )


def test_size_treemap_when_modules_nest_then_boxes_hold_the_sum_of_what_is_inside():
    made = size_treemap([record("a.conv.weight", 16), record("a.fc.weight", 8), record("b", 2)])
    (box,) = made.data
    sizes = dict(zip(box.ids, box.values, strict=True))
    parents = dict(zip(box.ids, box.parents, strict=True))
    assert sizes == {
        "all": 38,
        **{"a": 32, "a.conv": 20, "a.conv.weight": 20},
        **{"a.fc": 12, "a.fc.weight": 12, "b": 6},
    }
    assert parents["a.conv"] == "a"
    assert parents["a"] == parents["b"] == "all"
    assert parents["all"] == ""


def test_graph_objects_when_plotly_is_missing_then_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(MissingExtraError, match=r"pt2e-quant\[report\]"):
        size_treemap([record("a", 1)])


def test_reversed_scale_when_asked_then_little_is_good():
    assert reversed_scale()[0] == (0.0, SCALE[-1][1])
    assert [at for at, _ in reversed_scale()] == [0.0, 0.5, 1.0]


def test_figure_when_labels_are_long_then_titles_of_axes_stay_beside_them():
    made = figure([], title={"text": "any"})
    made.update_yaxes(title={"text": "metric"})
    assert made.layout.yaxis.automargin
    assert made.layout.yaxis.title.standoff
    assert made.layout.yaxis.title.text == "metric"
