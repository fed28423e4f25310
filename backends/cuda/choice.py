"""Which kernel a match gets, and why one gets none."""

from collections.abc import Callable

from torch.fx import GraphModule

from pt2e_quant.backends.cuda.policy import Measures
from pt2e_quant.backends.fuse_kernels import Decide
from pt2e_quant.core.schemes import Role
from pt2e_quant.graph.op_table import OUT
from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.quantized_values import requantized
from pt2e_quant.kernels.read_scheme import slots_fit


def decide_by(measures: Measures) -> Decide:
    """Of a graph: whether a kernel takes a match, as far as its q/dq, its row and speed go."""

    def decide(gm: GraphModule, refused: dict[str, str]) -> Callable[[Kernel, Match], bool]:
        return lambda kernel, match: _takes(gm, measures, kernel, match, refused)

    return decide


def _takes(
    gm: GraphModule, measures: Measures, kernel: Kernel, match: Match, refused: dict[str, str]
) -> bool:
    if not slots_fit(gm, kernel.row, match) or not _output_fits(kernel, match):
        return False
    broken = kernel.row.refusal(match)
    if broken is not None:
        reason: str | None = f"{kernel.op} needs {broken.text}"
    else:
        reason = measures.objection(kernel, match)
    if reason is None:
        return True
    refused.setdefault(match.anchor.name, reason)
    return False


def _output_fits(kernel: Kernel, match: Match) -> bool:
    """Whether a result that the row wants quantized is, as the row wants it."""
    slot = next((s for s in kernel.row.slots if s.role is Role.OUTPUT and s.at == OUT), None)
    if slot is None or slot.is_optional:
        return True
    written = requantized(match.anchor)
    return written is not None and any(written[0].dtype == a.dtype for a in slot.accepts)
