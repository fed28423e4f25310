"""Refuse weights that no kernel takes, by name, with the recipe that comes nearest."""

from collections.abc import Sequence

from torch.fx import GraphModule

from pt2e_quant.backends.cpu.recipes import RECIPES
from pt2e_quant.backends.target.recipe import Wanted
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.flow.report.report import FloatRegion
from pt2e_quant.graph.ops import LINEAR, is_call
from pt2e_quant.graph.subgraphs import named_graphs
from pt2e_quant.kernels.read_scheme import scheme_of


def loose_weights(program: GraphModule, weights: Sequence[FloatRegion]) -> UnsupportedError:
    """The error for weights that would be dequantized in every call.

    Args:
        program: the fused one.
        weights: what is left in it, at least one.
    """
    first = weights[0]
    graph, reader = next(
        (graph.gm, node)
        for graph in named_graphs(program)
        for node in graph.gm.graph.nodes
        if graph.prefix + node.name == first.node
    )
    nearest = ""
    for source in reader.all_input_nodes if is_call(reader, LINEAR) else []:
        scheme = scheme_of(graph, source)
        if scheme is None:
            continue
        wanted = Wanted.of_weight(scheme)
        nearest = f'the nearest recipe it runs is "{RECIPES.nearest(wanted)}"; or '
    return UnsupportedError(
        f"oneDNN has no fused operator for the quantized weight of {first.node}"
        + (f" and {len(weights) - 1} more" if len(weights) > 1 else "")
        + f": {first.reason}",
        node=reader,
        fix=f"{nearest}lower(..., strict=False) to dequantize it in every call",
    )
