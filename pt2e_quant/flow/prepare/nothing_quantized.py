"""The error for a graph in which nothing was annotated: the reasons, and a fix."""

from collections import Counter

from torch.fx import GraphModule

from pt2e_quant.core.errors import AnnotationError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.graph.ops import aten

_GENERAL_FIX = (
    "choose a recipe or scheme by the reasons above; docs/schemes.md has the nearest that each "
    "backend runs"
)
_DECOMPOSED_FIX = "prepare what torch.export.export gives, before run_decompositions()"


def nothing_quantized(gm: GraphModule) -> AnnotationError:
    """Count the reasons; name the node with the largest constants, and the commonest fix."""
    records = provenance_of(gm).floats
    reasons = Counter(record.reason for record in records).most_common(8)
    listed = "\n".join(f"    {count} x {reason}" for reason, count in reasons)
    largest = max((r for r in records if r.size), key=lambda record: record.size, default=None)
    named = (n for n in gm.graph.nodes if largest is not None and n.name == largest.node)
    found = Counter(record.fix for record in records if record.fix)
    fixes = [fix for fix, _ in found.most_common(1)]
    if any(n.target is aten.convolution.default for n in gm.graph.nodes):
        fixes = [_DECOMPOSED_FIX]
    return AnnotationError(
        "no tensor of this graph is to be quantized" + (":\n" + listed if listed else ""),
        node=next(named, None),
        fix="; or ".join([*fixes, _GENERAL_FIX]),
    )
