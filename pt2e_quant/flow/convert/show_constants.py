"""Show weights and biases to their observers, which no forward pass needs to do."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.flow.annotate.observer_choice import derive_bias_qparams
from pt2e_quant.flow.convert.observed_qparams import has_seen
from pt2e_quant.flow.prepare.prepared import observed_node
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.observers.static.derived import DerivedObserverOrFakeQuantize
from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver
from pt2e_quant.observers.weights.weight import WeightObserver
from pt2e_quant.passes.qdq.round_biases_to_accumulator import BIAS_BELOW


def show_constants(
    gm: GraphModule, nodes: Sequence[tuple[Node, Any]], *, is_qat: bool
) -> list[str]:
    """Show each constant to its observer if that saw nothing, and make room for biases.

    A bias has the step scale_x * scale_w of the sum that it is added to. Where either is tiny,
    as in a channel of a dead input, int32 does not hold it: the weight's scale is made larger.

    Args:
        gm: the prepared graph.
        nodes: observers of constants, and the nodes that call them.
        is_qat: the ranges were trained: they are left as they are.

    Returns:
        What was changed, for the report.
    """
    values = {node: constant_of(gm, observed_node(node)) for node, _ in nodes}
    for node, observer in nodes:
        if values[node] is not None and not has_seen(observer):
            observer(values[node])
    return [] if is_qat else list(_make_room(nodes, values))


def _make_room(
    nodes: Sequence[tuple[Node, Any]], values: dict[Node, Tensor | None]
) -> Iterator[str]:
    for node, observer in nodes:
        bias = values[node]
        if bias is None or not _is_bias(observer):
            continue
        activation, weight = observer.obs_or_fqs
        if not (has_seen(activation) and has_seen(weight)):
            continue
        steps = bias.detach().abs().float() / observer.calculate_qparams()[0] / BIAS_BELOW
        if bool((steps > 1).any()) and _widen(weight, steps.clamp(min=1.0)):
            yield (
                f"{observed_node(node).target}: the scales of {int((steps > 1).sum())} channels of "
                "its weight are larger than the weight asks for, so that int32 holds the bias"
            )


def _is_bias(observer: Any) -> bool:
    return (
        isinstance(observer, DerivedObserverOrFakeQuantize)
        and observer.derive_qparams_fn is derive_bias_qparams
        and len(observer.obs_or_fqs) == 2
    )


def _widen(observer: Any, factors: Tensor) -> bool:
    """Multiply the scales of a symmetric weight observer; False if it is of another kind."""
    if isinstance(observer, WeightObserver) and observer.group_size is None:
        held = [observer.scale]
    elif isinstance(observer, PerChannelMinMaxObserver | MinMaxObserver):
        held = [observer.min_val, observer.max_val]
    else:
        return False
    if not observer.is_symmetric:
        return False
    with torch.no_grad():
        for value in held:
            value.mul_(factors if value.numel() == factors.numel() else factors.max())
    return True
