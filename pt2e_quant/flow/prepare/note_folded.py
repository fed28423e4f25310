"""Notes in a graph of which of its constants others have taken in, for loading it back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2e_quant.flow.prepare.prepared import FOLDED_KEY, REWRITTEN_KEY
from pt2e_quant.graph.meta import attribute


def constants_read(gm: GraphModule) -> dict[str, Any]:
    """The constants that a graph reads, by name."""
    names = {str(n.target) for n in gm.graph.nodes if n.op == "get_attr" and n.users}
    return {name: attribute(gm, name) for name in names}


def note_folded(gm: GraphModule, before: Mapping[str, Any]) -> None:
    """Note in `meta` which constants are read no more, and which have another value.

    Args:
        gm: after passes.
        before: what it read before.
    """
    now = constants_read(gm)
    gm.meta[FOLDED_KEY] = before.keys() - now.keys()
    gm.meta[REWRITTEN_KEY] = {n for n in before.keys() & now.keys() if _differ(before[n], now[n])}


def _differ(old: object, new: object) -> bool:
    """True if a constant has another value than it had."""
    if old is new or not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return False
    return old.shape != new.shape or not torch.equal(old, new.to(old.dtype))
