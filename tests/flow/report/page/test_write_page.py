import json

import pytest

from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.flow.report.page.plot import figure, graph_objects
from pt2e_quant.flow.report.page.section import DataTable, Section
from pt2e_quant.flow.report.page.write_page import notebook_html, page, table_html, write_page
from tests.headless_browser import needs_browser, open_page

TABLE = DataTable(
    columns=("tensor", "dB"),
    rows=tuple((f"t{n}</script><b>", float(n)) for n in range(30)),
    sort_by=1,
    is_descending=True,
)


def bars(height):
    return figure([graph_objects().Bar(x=["a", "b"], y=[1, height])])


SECTIONS = [
    Section(title="Later", table=TABLE, rank=60),
    Section(title="Facts <1>", text="a & b", facts=(("size", "1 < 2"),), rank=0),
    Section(title="Pictures", figures={"one": lambda: bars(1), "two": lambda: bars(2)}, rank=20),
]


def data_of(text):
    begin = text.index('id="data">') + len('id="data">')
    return json.loads(text[begin : text.index("</script>", begin)])["sections"]


def test_page_when_made_then_in_order_of_rank_and_whole():
    text = page("A <title>", SECTIONS)
    assert text.index("Facts &lt;1&gt;") < text.index("Pictures") < text.index("Later")
    assert "A &lt;title&gt;" in text
    assert "a &amp; b" in text
    assert [len(section["figures"]) for section in data_of(text)] == [0, 2, 0]
    assert data_of(text)[2]["table"]["rows"][3] == ["t3</script><b>", 3.0]
    assert "src=" not in text.split('id="plotly"')[0]  # nothing is loaded


def test_page_when_without_figures_then_without_plotly():
    assert len(page("t", SECTIONS[:2])) < 40_000


def test_page_when_numbers_are_infinite_then_the_data_is_json():
    table = DataTable(columns=("x",), rows=((float("inf"),), (float("nan"),), (1 / 3,)))
    (found,) = data_of(page("t", [Section(title="s", table=table)]))
    assert found["table"]["rows"] == [["inf"], ["nan"], [0.333333]]


def test_write_page_when_the_folder_is_missing_then_says_so(tmp_path):
    with pytest.raises(ArtifactError, match="cannot write"):
        write_page(tmp_path / "no" / "page.html", "t", [])


def test_notebook_html_when_shown_then_first_rows_in_the_order_of_the_table():
    text = notebook_html(SECTIONS, rows=2)
    assert "<td>t29&lt;/script&gt;&lt;b&gt;</td><td>29</td>" in text
    assert text.count("<tr>") == 3
    assert table_html(DataTable(columns=("a",), rows=((None,),))).count("<td></td>") == 1


@needs_browser
@pytest.mark.parametrize("width", [1280, 400])
def test_page_when_opened_then_draws_without_a_complaint(tmp_path, width):
    path = tmp_path / "page.html"
    write_page(path, "t", SECTIONS)
    found = open_page(path, width=width)
    assert found.complaints == []
    assert found.dom.count('data-drawn="yes"') == 1
    assert found.dom.count("<option") == 2
    assert "10 of 30" in found.dom
    assert found.dom.index(">t29&lt;") < found.dom.index(">t28&lt;")
    assert ">t19&lt;" not in found.dom
