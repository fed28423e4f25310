"""Notes in a graph of which of its constants others have taken in, for loading it back."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.fx import GraphModule

from pt2e_quant.flow.prepare.prepared import FOLDED_KEY, REWRITTEN_KEY
from pt2e_quant.graph.meta import attribute

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_Mark = tuple[torch.Size, float, float] | None
"""What tells values apart; weights held themselves would stay beside what is made of them."""


def constants_read(gm: GraphModule) -> dict[str, _Mark]:
    """Marks of the constants that a graph reads, by name; None of those that are no floats."""
    names = {str(n.target) for n in gm.graph.nodes if n.op == "get_attr" and n.users}
    return {name: _mark(attribute(gm, name)) for name in names}


def note_folded(gm: GraphModule, before: Mapping[str, _Mark]) -> None:
    """Note in `meta` which constants are read no more, and which have another value.

    Args:
        gm: after passes.
        before: the marks of what it read before.
    """
    now = constants_read(gm)
    gm.meta[FOLDED_KEY] = before.keys() - now.keys()
    gm.meta[REWRITTEN_KEY] = {n for n in before.keys() & now.keys() if _differ(before[n], now[n])}


def _mark(value: object) -> _Mark:
    if not isinstance(value, Tensor) or value.dtype not in _FLOATS or value.is_meta:
        return None
    # In the tensor's own dtype: in another one it would be copied.
    values = value.detach()
    return value.shape, float(values.sum()), float(torch.linalg.vector_norm(values))


def _differ(old: _Mark, new: _Mark) -> bool:
    """True if a constant has another value than it had."""
    if old is None or new is None:
        return False
    is_near = all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(old[1:], new[1:], strict=True))
    return old[0] != new[0] or not is_near
