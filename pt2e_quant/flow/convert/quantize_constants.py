"""Quantize constants: show them to observers, choose qparams, store integers.

No forward pass needs to show a weight or a bias to its observer.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import CalibrationError, ConfigError
from pt2e_quant.core.progress import show_progress
from pt2e_quant.core.provenance import TensorRecord
from pt2e_quant.core.qparams import QParams
from pt2e_quant.flow.annotate.observer_choice import derive_bias_qparams
from pt2e_quant.flow.convert.emit_qdq import Layout, static_layout
from pt2e_quant.flow.convert.joint_qparams import is_min_max, joint_qparams, range_of
from pt2e_quant.flow.convert.observed_qparams import has_seen, observed_range, record_of, recorded
from pt2e_quant.flow.prepare.prepared import HeldConstant, observed_node
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.observers.qschemes import SYMMETRIC
from pt2e_quant.observers.static.derived import DerivedObserverOrFakeQuantize
from pt2e_quant.observers.static.fixed import ImportedQParams
from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver
from pt2e_quant.observers.training.trained_qparams import qparams_of
from pt2e_quant.observers.weights.weight import WeightObserver
from pt2e_quant.passes.qdq.round_biases_to_accumulator import BIAS_BELOW
from pt2e_quant.passes.weights.store_weights import WeightStore, qdq_name

__all__ = []


class HeldPlace:
    """A held constant found again in the graph.

    Attributes:
        constant: what prepare noted.
        source: the node that holds it.
        readers: the nodes that are to read it quantized.
        value: what it holds.
    """

    def __init__(self, gm: GraphModule, constant: HeldConstant, nodes: Mapping[str, Node]) -> None:
        self.constant = constant
        self.source = _found(nodes, constant.node, constant)
        self.readers = [_found(nodes, name, constant) for name in constant.readers]
        value = constant_of(gm, self.source)
        if value is None or any(self.source not in r.all_input_nodes for r in self.readers):
            raise _edited(constant, self.source)
        self.value: Tensor = value

    @property
    def like(self) -> Node:
        """The node that gives q/dq their module stack: the reader, or a view of a constant."""
        return self.readers[0] if self.source.op == "get_attr" else self.source


def held_places(gm: GraphModule, constants: Sequence[HeldConstant]) -> list[HeldPlace]:
    """Held constants in the graph.

    Raises:
        ConfigError: the graph was edited since prepare so that one is not there any more.
    """
    if not constants:
        return []
    nodes = {node.name: node for node in gm.graph.nodes}
    return [HeldPlace(gm, constant, nodes) for constant in constants]


def _found(nodes: Mapping[str, Node], name: str, constant: HeldConstant) -> Node:
    if name not in nodes:
        raise _edited(constant, None)
    return nodes[name]


def _edited(constant: HeldConstant, node: Node | None) -> ConfigError:
    return ConfigError(
        f'"{constant.observer_info.source}" is to be quantized for {", ".join(constant.readers)}, '
        "which the graph does not say any more",
        node=node,
        fix="edit the graph before prepare_pt2e, or after convert_pt2e",
    )


def quantize_constants(
    gm: GraphModule, editor: Editor, places: Sequence[HeldPlace], *, progress: bool = False
) -> list[TensorRecord]:
    """Put integers and a dequantize for each reader in the place of each constant.

    Before:  linear(x, weight)
    After:   linear(x, dequantize(weight_q, weight_scale, weight_zero_point, …))

    The float weight is let go at once where nothing else reads it.

    Args:
        gm: the graph module.
        editor: edits its graph; `finish` is the caller's.
        places: under observers whose qparams are static and of integers.
        progress: show a progress bar on a terminal.

    Returns:
        The records of the constants.

    Raises:
        CalibrationError: NaN or infinity in a constant, which is named.
        ConfigError: an observer cannot be for its constant.
    """
    store = WeightStore(gm, editor)
    layouts: dict[Node, Layout] = {}
    groups: dict[int, list[HeldPlace]] = {}
    for place in places:
        groups.setdefault(place.constant.observer_info.group, []).append(place)
    known = _observe_jointly(groups)
    records = []
    for group, members in show_progress(groups.items(), "quantizing weights", enabled=progress):
        found = known[group] if group in known else _observe(members)
        for place in members:
            integers = store.put(place.source, place.value, found.qparams, like=place.like)
            if integers not in layouts:
                base = qdq_name(place.source)
                layouts[integers] = static_layout(editor, base, found.qparams, like=place.like)
            _insert_dequantizes(editor, place, integers, layouts[integers])
            record = found.record(place)
            record.size_before = place.value.numel() * place.value.element_size()
            record.size_after = _stored_bytes(integers, layouts[integers])
            records.append(record)
        for place in members:
            del place.value
            store.erase_if_unread(place.source)
    return records


@dataclass(frozen=True, slots=True)
class _Found:
    """The result of observing the constants of one group."""

    observer: Any
    qparams: QParams
    observed: tuple[float, float] | None

    def record(self, place: HeldPlace) -> TensorRecord:
        observer_info, name = place.constant.observer_info, type(self.observer).__name__
        fields = recorded(self.qparams)
        return record_of(observer_info, place.like, self.observer, name, fields, self.observed)


def _observe_jointly(groups: Mapping[int, Sequence[HeldPlace]]) -> dict[int, _Found]:
    """Observe constants with min-max observers, all those of equal settings at once."""
    ranges: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
    observers: dict[int, Any] = {}
    for group, members in groups.items():
        observer = members[0].constant.observer
        if len(members) > 1 or not is_min_max(observer):
            continue
        ends = range_of(observer, members[0].value)
        if ends is not None:
            observers[id(observer)] = observer
            ranges.setdefault(id(observer), {})[group] = ends
    found: dict[int, _Found] = {}
    for key, own in ranges.items():
        made = joint_qparams(observers[key], list(own.values()))
        for (group, (low, high)), qparams in zip(own.items(), made or (), strict=False):
            observed = low.min().item(), high.max().item()
            found[group] = _Found(observers[key], qparams, observed)
    return found


def _observe(members: Sequence[HeldPlace]) -> _Found:
    """Observe the constants of one group, one after another."""
    observer: Any = copy.deepcopy(members[0].constant.observer)
    node = members[0].source
    try:
        for place in members:
            node = place.source
            observer(place.value)
        return _Found(observer, qparams_of(observer), observed_range(observer))
    except (CalibrationError, ConfigError) as error:
        if error.node_name:
            raise
        raise type(error)(error.what, node=node, fix=error.fix) from error


def _insert_dequantizes(editor: Editor, place: HeldPlace, integers: Node, layout: Layout) -> None:
    quantized = layout.of(integers)
    for reader in place.readers:
        like = reader if place.source.op == "get_attr" else place.source
        made = quantized.dequantize(editor, of=place.source, like=like)
        reader.replace_input_with(place.source, made)


def _stored_bytes(integers: Node, layout: Layout) -> int:
    nodes = [integers, *(a for a in layout.arguments if isinstance(a, Node))]
    values: list[Tensor] = [node.meta["val"] for node in nodes]
    return sum(value.numel() * value.element_size() for value in values)


def show_constants(
    gm: GraphModule, nodes: Sequence[tuple[Node, Any]], *, is_qat: bool
) -> list[str]:
    """Show each constant to its observer if it saw nothing, and widen scales for biases.

    A bias has the scale scale_x * scale_w of the sum that it is added to. If either is tiny, as in
    a channel that is always 0, the bias overflows int32: then the weight's scale is made larger.

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
    if isinstance(observer, WeightObserver | ImportedQParams) and observer.group_size is None:
        held = [observer.scale]
    elif isinstance(observer, PerChannelMinMaxObserver | MinMaxObserver):
        held = [observer.min_val, observer.max_val]
    else:
        return False
    if observer.qscheme not in SYMMETRIC:
        return False
    with torch.no_grad():
        for value in held:
            value.mul_(factors if value.numel() == factors.numel() else factors.max())
    return True
