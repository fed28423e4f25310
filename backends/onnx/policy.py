"""Operators that this backend keeps float although ONNX Runtime could run them in integers."""

from pt2e_quant.backends.onnx.table import STATIC_TABLE
from pt2e_quant.backends.target.leave_slower import NOT_SLOWER
from pt2e_quant.backends.target.policy import ROUTERS, SPECTRA, Policy
from pt2e_quant.core.schemes import Role
from pt2e_quant.graph.op_table import OpRow
from pt2e_quant.graph.pattern import Match


def _runs(row: OpRow, match: Match) -> bool:
    weights = [slot.at for slot in row.slots if slot.role is Role.WEIGHT]
    return row.refusal(match) is None and all(match.is_constant(at) for at in weights)


POLICY = Policy(
    rows=STATIC_TABLE.rows,
    runs=_runs,
    of_matches=(NOT_SLOWER, ROUTERS, SPECTRA),
)
