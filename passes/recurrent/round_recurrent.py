"""Let recurrent layers round as they were annotated: convert's part of what observers are else."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.core.recurrent_ops import ROUNDING_KEY, RecurrentLayer, Rounding
from pt2e_quant.graph.pipeline import GraphPass, PassResult


def _edit(gm: GraphModule) -> PassResult:
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=RecurrentLayer):
        if (rounding := node.meta.pop(ROUNDING_KEY, None)) is not None:
            node.args = (*node.args[:-1], rounding)
            changed = True
    return PassResult(changed)


round_recurrent = GraphPass("round_recurrent", _edit, needs=(), gives=())
"""The pass that gives recurrent layers the rounding in their metadata.

Before:  recurrent_layer(x, h0, c0, w_ih, w_hh, …, "none"), metadata "per_row"
After:   recurrent_layer(x, h0, c0, w_ih, w_hh, …, "per_row")
"""


def rounding_of(layer: Node) -> Rounding:
    """How a recurrent layer of a prepared graph is to round."""
    return Rounding(layer.meta.get(ROUNDING_KEY, Rounding.NONE))


def as_rounded(node: Node) -> Callable[..., Any]:
    """The function that computes a node of a prepared graph as it is after convert.

    Args:
        node: a call of a function.
    """
    rounding, target = node.meta.get(ROUNDING_KEY), node.target
    assert callable(target)  # exported graphs call functions
    return target if rounding is None else partial(_layer, rounding)


def _layer(rounding: str, *args: Any) -> Any:
    """A layer whose last argument is replaced."""
    return RecurrentLayer(*args[:-1], rounding)
