"""Operators that this backend keeps float although XNNPACK could run them in integers."""

from torch.fx import Node

from pt2e_quant.backends.target.leave_slower import NOT_SLOWER
from pt2e_quant.backends.target.policy import ROUTERS, SPECTRA, Policy, Regions
from pt2e_quant.backends.xnnpack.gemm_rows import CLIPS
from pt2e_quant.backends.xnnpack.table import STATIC_ROWS
from pt2e_quant.graph.conditions import TENSOR_OPERANDS
from pt2e_quant.graph.idioms.rms_norm import FEATURE_NORMS, find_roots
from pt2e_quant.graph.op_table import OpKind, OpRow, Preference
from pt2e_quant.graph.ops import GROUP_NORM, MEAN, Overloads, aten, is_call
from pt2e_quant.graph.pattern import Match

NORMS: Overloads = (
    *FEATURE_NORMS,
    *GROUP_NORM,
    aten.instance_norm.default,
)

_SMOOTH = frozenset({"elu", "gelu", "hardswish", "leaky_relu", "sigmoid", "tanh"})
"""Rows of activation functions between which and a linear outlier channels are scaled."""

_AT_OUTPUT: Overloads = (
    *CLIPS,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.max_pool2d.default,
    aten.avg_pool2d.default,
    aten.adaptive_avg_pool2d.default,
    *MEAN,
)
"""Operators that are quantized also where only the program's output reads them."""


def _runs(row: OpRow, match: Match) -> bool:
    # A number as operand becomes a tensor after placement, where it is worth one.
    return all(c.holds(match) for c in row.constraints if c is not TENSOR_OPERANDS)


def _follow_linears(regions: Regions) -> set[Node]:
    """Smooth activation functions that work on what a linear gives."""
    matches = regions.matches

    def carries(anchor: Node) -> bool:
        # It moves values, or scales them by a number, as one that caps logits does.
        row = matches[anchor][0]
        is_scaled = row.name in ("mul", "div") and len(anchor.all_input_nodes) == 1
        return row.kind is OpKind.MOVES or is_scaled

    found = set()
    for anchor in (a for a, (row, _) in matches.items() if row.name in _SMOOTH):
        source = regions.inputs(anchor)[0]
        while source in matches and carries(source):
            source = regions.inputs(source)[0]
        if source in matches and matches[source][0].name == "linear":
            found.add(anchor)
    return found


def _feed_norms(regions: Regions) -> set[Node]:
    """Adds whose sum reaches a normalization through adds and data movement alone."""
    found: set[Node] = set()
    waiting = [n.args[0] for n in regions.gm.graph.nodes if is_call(n, NORMS)]
    waiting += find_roots(regions.gm.graph).values()
    while waiting:
        node = waiting.pop()
        if not isinstance(node, Node) or node in found or node not in regions.matches:
            continue
        row, _ = regions.matches[node]
        if row.name in ("add", "sub"):
            found.add(node)
        elif row.kind is not OpKind.MOVES:
            continue
        waiting += regions.inputs(node)
    return found


POLICY = Policy(
    rows=STATIC_ROWS,
    runs=_runs,
    at_output=lambda node: is_call(node, _AT_OUTPUT),
    marks_moves=True,
    of_matches=(NOT_SLOWER, ROUTERS, SPECTRA),
    exceptions=(
        (
            Preference(
                name="norm_inputs",
                text="a sum that no normalization reads (its rounding would cost most)",
            ),
            _feed_norms,
        ),
        (
            Preference(
                name="after_linear",
                text="no linear before it (whose outlier channels are scaled in float)",
            ),
            _follow_linears,
        ),
    ),
)
