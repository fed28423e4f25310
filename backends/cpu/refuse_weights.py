"""Refuse weights that no kernel takes, by name, with the recipe that comes nearest."""

from collections.abc import Sequence

from torch.fx import GraphModule

from pt2e_quant.backends.refuse_formats import Wanted
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.granularity import PerGroup
from pt2e_quant.flow.report.report import FloatRegion
from pt2e_quant.graph.ops import LINEAR, is_call
from pt2e_quant.graph.subgraphs import named_graphs
from pt2e_quant.kernels.int4_linear.op import GROUP_SIZES
from pt2e_quant.kernels.read_scheme import scheme_of

__all__ = ["loose_weights", "nearest_recipe"]


def nearest_recipe(wanted: Wanted) -> str:
    """The recipe nearest to what a q/dq that has no kernel asks for."""
    if wanted.is_activation:
        return "int8_dynamic" if wanted.is_dynamic else "int8"
    if wanted.bits > 4:
        return "w8"
    group = wanted.group_size
    if group is None:
        return "w4"
    return f"w4_g{min(GROUP_SIZES, key=lambda size: abs(size - group))}"


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
        group = scheme.granularity.group_size if isinstance(scheme.granularity, PerGroup) else None
        wanted = Wanted(scheme.bits, False, False, group, str(scheme))
        nearest = f'the nearest recipe it runs is "{nearest_recipe(wanted)}"; or '
    return UnsupportedError(
        f"oneDNN has no fused operator for the quantized weight of {first.node}"
        + (f" and {len(weights) - 1} more" if len(weights) > 1 else "")
        + f": {first.reason}",
        node=reader,
        fix=f"{nearest}lower(..., strict=False) to dequantize it in every call",
    )
