"""What the passes of a lowering sent back to float, by the nodes of the graph that was lowered."""

from collections.abc import Iterable, Sequence

from torch.fx import GraphModule

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.flow.report.report import FloatRegion
from pt2e_quant.graph.meta import origin_name
from pt2e_quant.graph.pipeline import Note

_SEPARATOR = ", "


def float_regions(notes: Iterable[Note], work: GraphModule, gm: GraphModule) -> list[FloatRegion]:
    """The regions that notes of passes tell of.

    Args:
        notes: by nodes of `work`, several of them with commas between.
        work: what the passes changed; operators that it was written with have other names.
        gm: the graph that was lowered.
    """
    given = {node.name for node in gm.graph.nodes}
    written_for = {origin_name(node): node.name for node in gm.graph.nodes if not is_qdq(node)}
    names = {n.name: written_for.get(origin_name(n), n.name) for n in work.graph.nodes}
    found: dict[tuple[str, str], None] = {}
    for note in notes:
        told = [n if n in given else names.get(n, n) for n in note.node.split(_SEPARATOR)]
        found[_SEPARATOR.join(dict.fromkeys(told)), note.text] = None
    return [FloatRegion(node=node, what="runs in float", reason=text) for node, text in found]


def refuse_float(gm: GraphModule, regions: Sequence[FloatRegion]) -> None:
    """Stop at the first region.

    Raises:
        UnsupportedError: naming it.
    """
    for worst in regions[:1]:
        names = worst.node.split(_SEPARATOR)
        raise UnsupportedError(
            f"XNNPACK cannot keep {worst.node} quantized: {worst.reason}",
            node=next((n for n in gm.graph.nodes if n.name in names), None),
            fix="lower(..., strict=False) to run it in float",
        )
