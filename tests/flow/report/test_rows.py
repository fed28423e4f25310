from pt2e_quant.core.provenance import FloatRecord, TensorRecord
from pt2e_quant.core.schemes import Role
from pt2e_quant.flow.report.rows import float_lines, kind_of


def test_float_rows_when_reasons_are_alike_then_one_row_with_its_operators():
    records = [
        FloatRecord(node=f"{op}_{n}", op=f"aten.{op}", module="", reason="B has no int8 form")
        for n, op in enumerate(["mul", "add", "mul"])
    ]
    (row,) = float_lines(records, "B")
    assert (row.count, row.operators, row.nodes) == (3, "2 mul, add", "mul_0, add_1, mul_2")


def test_kind_of_when_chosen_at_run_time_then_without_a_range():
    record = TensorRecord(name="x", role=Role.INPUT, dtype="int8", is_dynamic=True)
    assert kind_of(record) == "int8 at run time"
