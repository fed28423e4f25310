"""The conv or linear before a batch norm, and whether its output channels are normalised."""

from torch.fx import Node

from pt2e_quant.graph.ops import (
    CONV,
    CONV_TRANSPOSE,
    IDENTITIES,
    LINEAR,
    PERMUTE,
    SQUEEZE,
    UNSQUEEZE,
    argument,
    arguments,
    aten,
    is_call,
    is_getitem,
)
from pt2e_quant.graph.pattern import Match, Op, Var

MOVES = PERMUTE + UNSQUEEZE + SQUEEZE + IDENTITIES
"""Views through which the channel dimension can be followed."""

PRODUCER = Op(
    CONV + CONV_TRANSPOSE + LINEAR,
    Var("x"),
    Var("w"),
    Var("b"),
    name="producer",
    users=None,
    through=MOVES,
)
"""The operator whose output a batch norm reads, also through moves."""


def moved_back(view: Node, dim: int) -> int | None:
    """The dimension of a view's input that is dimension `dim` of its result, None if unknown."""
    source = view.args[0]
    if not isinstance(source, Node):
        return None
    rank = int(source.meta["val"].dim())
    given = arguments(view)
    if is_call(view, IDENTITIES):
        return dim
    if is_call(view, (aten.permute.default,)):
        return int(given["dims"][dim]) % rank
    if is_call(view, (aten.transpose.int, aten.swapaxes.default)):
        a, b = (int(d) % rank for d in list(given.values())[1:3])
        return {a: b, b: a}.get(dim, dim)
    if is_call(view, (aten.mT.default,)):
        return {rank - 1: rank - 2, rank - 2: rank - 1}.get(dim, dim)
    if is_call(view, (aten.unsqueeze.default,)):
        new = int(given["dim"]) % (rank + 1)
        return None if dim == new else dim - (dim > new)
    if is_call(view, (aten.squeeze.dim,)):
        gone = int(given["dim"]) % rank
        if view.meta["val"].dim() == rank:
            return dim
        return dim + (dim >= gone)
    return None


def channel_dim(producer: Node) -> int:
    """The dimension of a conv's or linear's output that holds its channels.

    It is 0 for a convolution of one image, without a batch dimension.
    """
    behind = 1 if is_call(producer, LINEAR) else argument(producer, "weight").meta["val"].dim() - 1
    return int(producer.meta["val"].dim() - behind)


def channel_follows(producer: Node, norm: Node) -> bool:
    """True if dimension 1 of the batch norm's input is the producer's output channel."""
    dim: int | None = 1
    value = argument(norm, "input")
    while value is not producer and dim is not None:
        dim = moved_back(value, dim)
        value = value.args[0]
    return dim == channel_dim(producer)


def other_results_used(m: Match) -> bool:
    """True if something reads the statistics that a batch norm with several results saves."""
    return any(
        is_getitem(user) and user is not m.anchor and bool(user.users)
        for user in m.nodes["bn"].users
    )
