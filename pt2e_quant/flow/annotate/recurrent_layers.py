"""Choose the recurrent operators that are split into layers with integer weights."""

from collections.abc import Callable, Collection
from typing import TypeAlias

from torch.fx import GraphModule, Node

from pt2e_quant.core.recurrent_ops import Rounding
from pt2e_quant.core.schemes import INT8_WEIGHT
from pt2e_quant.flow.annotate.match_reader import LEFT_KEY
from pt2e_quant.flow.annotate.rules import RuleBook
from pt2e_quant.graph.op_table import ALLOWED_KEY
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.recurrent.split_recurrent import LayerSizes, split_cells, split_recurrent

RecurrentForm: TypeAlias = Callable[[LayerSizes, bool, Collection[str]], Rounding | str]
"""Of a layer, whether the scheme rounds activations, and the names of preferences that the user
overrules: how a backend rounds its operands at run time, or why it has no integer form of it."""


def place_recurrent(gm: GraphModule, book: RuleBook, form: RecurrentForm) -> None:
    """Split the recurrent operators that rules give int8 weights; the others get a reason.

    Args:
        gm: the graph to annotate.
        book: the quantizer's rules.
        form: the backend's.
    """

    def rounding_of(node: Node, sizes: LayerSizes) -> Rounding | str:
        scheme = book.scheme_for(node)
        if scheme is None or scheme.weight is None:
            return "a rule leaves its weights float"
        if not scheme.weight.narrowed().fits(INT8_WEIGHT):
            return f"recurrent layers take {INT8_WEIGHT} for weights, not {scheme.weight}"
        return form(sizes, scheme.input is not None, gm.meta.get(ALLOWED_KEY, ()))

    records = run_passes(
        gm,
        (split_recurrent(rounding_of), split_cells(lambda node: book.scheme_for(node) is not None)),
    )
    reasons = {n.node: n.text for record in records for n in record.notes if n.skipped}
    for node in gm.graph.nodes:
        if node.name in reasons:
            node.meta[LEFT_KEY] = reasons[node.name]
