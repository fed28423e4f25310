"""Products that oneDNN would cut off on a CPU without VNNI, left in float."""

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.float_retries import Fallback, mark_fallback
from pt2e_quant.core.qdq import QdqKind, is_dequantize, kind_of_qdq
from pt2e_quant.flow.report.report import FloatRegion
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import CONV, LINEAR, argument, is_call
from pt2e_quant.graph.subgraphs import copy_graph, named_graphs
from pt2e_quant.kernels.onednn.exact_products import multiplies_exactly, onednn_is_exact
from pt2e_quant.kernels.quantized_values import affine_of

_REASON = (
    "this machine's oneDNN cuts off sums of 8-bit products of this weight (it has no VNNI, or "
    "ONEDNN_MAX_CPU_ISA hides it)"
)
_FIX = '; algorithms=["pair_scales", "pair_codes"] make weights that it multiplies exactly'


def leave_saturating(gm: GraphModule) -> tuple[GraphModule, list[FloatRegion]]:
    """Mark what is to stay in float on this machine: a marked copy, and the report's entries.

    The graph itself is given where nothing is.
    """
    if onednn_is_exact():
        return gm, []
    made = copy_graph(gm)
    regions = []
    for node in _sites(made):
        mark_fallback(node, Fallback.FLOAT)
        regions.append(
            FloatRegion(
                node=node.name,
                what="runs in float",
                reason=_REASON + (_FIX if is_dequantize(argument(node, "input")) else ""),
                cost="float operators, weights held in float",
            )
        )
    return (made, regions) if regions else (gm, [])


def _sites(gm: GraphModule) -> list[Node]:
    """The products of 8-bit activations that are not exact."""
    return [
        node
        for graph in named_graphs(gm)
        for node in graph.gm.graph.nodes
        if is_call(node, (*LINEAR, *CONV)) and _saturates(graph.gm, node)
    ]


def _saturates(gm: GraphModule, node: Node) -> bool:
    x, weight = argument(node, "input"), argument(node, "weight")
    if not is_dequantize(weight):
        return False
    if [kind_of_qdq(n) for n in (x, weight)] == [QdqKind.PER_TOKEN, QdqKind.PER_CHANNEL]:
        return False  # its kernel multiplies exactly on every CPU
    affine = affine_of(x)
    if affine is None or affine.dtype not in (torch.uint8, torch.int8):
        return is_call(node, LINEAR)  # rows in limbs, of which all values are used
    if affine.quant_max + (128 if affine.dtype is torch.int8 else 0) <= 127:
        return False
    codes = constant_of(gm, weight.all_input_nodes[0])
    return codes is not None and not multiplies_exactly(codes)
