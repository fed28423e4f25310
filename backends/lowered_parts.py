"""Lower each part of a graph once for all searches of a check."""

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2e_quant.backends.artifact import Artifact

LowerPart: TypeAlias = Callable[[GraphModule], Artifact]
"""Lowers a cut graph as the whole was, unchecked."""
MOST_KEPT = 32
"""So many programs are kept, each with its own weights: those that two searches lower at most."""


def lowered_once(lower_part: LowerPart) -> LowerPart:
    """Lower parts, each once: a check may search for the operator at fault once a result and call.

    Args:
        lower_part: lowers what `cut_behind` made of one graph, which the value it ends with names.

    Returns:
        The same, whose programs start with the buffers of a first call. What it could not lower
        it refuses with the same error.
    """
    known: OrderedDict[str, Artifact | Exception] = OrderedDict()

    def lower(part: GraphModule) -> Artifact:
        end = _end_of(part)
        if end not in known:
            try:
                known[end] = lower_part(part)
            except Exception as error:  # Whatever stops a lowering: the caller passes it over.
                known[end] = error
        known.move_to_end(end)
        while len(known) > MOST_KEPT:
            known.popitem(last=False)
        found = known[end]
        if isinstance(found, Exception):
            raise found
        found.reset()
        return found

    return lower


def _end_of(part: GraphModule) -> str:
    (end,) = pytree.tree_leaves(part.graph.output_node().args[0])
    assert isinstance(end, Node)
    return end.name
