"""Integer products that are wrong on this machine: found by trial, left float with that reason."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.backends.fuse_kernels import ANCHOR_KEY, KERNEL_KEY, Decide
from pt2e_quant.core.qdq import is_dequantize, is_qdq
from pt2e_quant.core.unpack_op import Unpack
from pt2e_quant.flow.report.report import FloatRegion
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.pattern import Match
from pt2e_quant.graph.pipeline import GraphPass, Note, PassResult
from pt2e_quant.graph.subgraphs import named_graphs
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.product_trial.read_node import products_of
from pt2e_quant.kernels.product_trial.verdicts import verdicts_of

FAILED_PRODUCT = "integer product that fails here"
"""What the report calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A kernel that does not compute what it should, at one place of a graph.

    Args:
        row: the kernel's.
        anchor: the last operator that its fused call took the place of.
        reason: what is wrong with its product.
    """

    row: str
    anchor: str
    reason: str

    @property
    def float_region(self) -> FloatRegion:
        """As the report has it."""
        return FloatRegion(
            node=self.anchor,
            what=FAILED_PRODUCT,
            reason=f'{self.reason}: "{self.row}" is not used',
            cost="float operators, weights held in float",
        )


def find_failures(program: GraphModule) -> tuple[tuple[Failure, ...], str]:
    """The fused calls of a program whose products are wrong on this machine.

    Each distinct product is tried once on random integers, in a child process; what is found is
    kept for later programs.

    Returns:
        Those calls, and why nothing could be tried, "" if it could.
    """
    nodes = (node for graph in named_graphs(program) for node in graph.gm.graph.nodes)
    by_node = {node: products_of(node) for node in nodes if KERNEL_KEY in node.meta}
    wanted = dict.fromkeys(product for products in by_node.values() for product in products)
    if not wanted:
        return (), ""
    reasons, untried = verdicts_of(wanted)
    failures = []
    for node, products in by_node.items():
        reason = next((reasons[product] for product in products if reasons[product]), "")
        if reason:
            row, anchor = node.meta[KERNEL_KEY].name, node.meta[ANCHOR_KEY]
            failures.append(Failure(row=row, anchor=anchor, reason=reason))
    return tuple(failures), untried


def deciding_without(decide: Decide, failures: Sequence[Failure]) -> Decide:
    """A decision that also refuses kernels where they failed."""
    reasons = {(failure.row, failure.anchor): failure.reason for failure in failures}

    def decide_by_trial(
        gm: GraphModule, refused: dict[str, str]
    ) -> Callable[[Kernel, Match], bool]:
        takes = decide(gm, refused)

        def takes_tried(kernel: Kernel, match: Match) -> bool:
            reason = reasons.get((kernel.name, match.anchor.name))
            if reason is None:
                return takes(kernel, match)
            refused.setdefault(match.anchor.name, reason)
            return False

        return takes_tried

    return decide_by_trial


def hold_weights(failures: Sequence[Failure]) -> GraphPass:
    """A pass that dequantizes the weights of failed products once, instead of in every call.

    Before:  conv2d(x, dq(weight), b)
    After:   conv2d(x, weight_float, b)

    A compiler would also see the integer product in the first form, and fuse it again.
    """
    anchors = {failure.anchor for failure in failures}

    def edit(gm: GraphModule) -> PassResult:
        editor = Editor(gm)
        notes = []
        for node in [n for n in gm.graph.nodes if is_dequantize(n)]:
            value = _held(gm, node)
            if value is None or not _leads_to(node, anchors):
                continue
            held = editor.constant(f"{node.name}.held", value, like=node)
            editor.replace(node, held)
            notes.append(Note(node.name, "held in float"))
        return PassResult(changed=editor.finish(), notes=tuple(notes))

    return GraphPass("hold_weights", edit, needs=(), gives=())


def _leads_to(node: Node, anchors: set[str]) -> bool:
    """Whether a weight's product, or what was to be fused with it, is among the anchors."""
    reached = list(node.users)
    for _ in range(_LONGEST_CHAIN):
        if any(reader.name in anchors for reader in reached):
            return True
        reached = [user for reader in reached if not is_qdq(reader) for user in reader.users]
    return False


_LONGEST_CHAIN = 3
"""A product, a sum and a function are the longest pattern."""


def _held(gm: GraphModule, node: Node) -> Tensor | None:
    """What a dequantize of a constant always gives, None of anything else."""
    found = constant_of(gm, node)
    if found is not None or not (is_dequantize(node) or node.target is Unpack):
        return found
    inputs: Mapping[Node, Tensor | None] = {n: _held(gm, n) for n in node.all_input_nodes}
    if any(value is None for value in inputs.values()):
        return None
    target: Any = node.target
    with torch.no_grad():
        made: Tensor = target(
            *map_arg(node.args, inputs.__getitem__), **map_arg(node.kwargs, inputs.__getitem__)
        )
    return made
