import pytest

from pt2e_quant.flow.report.page.section import DataTable, Section


def test_section_when_made_by_position_then_refused():
    with pytest.raises(TypeError):
        Section("a title")
    with pytest.raises(TypeError):
        DataTable(("a",), ())
