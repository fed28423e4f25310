"""Insert the observers of annotated places into a graph.

Constants get no observer node where `may_hold` allows it: convert observes them once. A node would
observe the same values again in every batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.traceback import NodeSource, NodeSourceAction

from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.schemes import Role
from pt2e_quant.core.specs import Q_ANNOTATION_KEY, EdgeOrNode, SpecKind, kind_of
from pt2e_quant.flow.annotate.check_specs import check_groups, check_observers
from pt2e_quant.flow.annotate.groups import Group, collect_groups, place_name, reader_of
from pt2e_quant.flow.annotate.table_quantizer import MASKS_KEY
from pt2e_quant.flow.annotate.write_annotations import RULE_KEY
from pt2e_quant.flow.prepare.make_observer import make_observer, make_observers, spec_key
from pt2e_quant.flow.prepare.prepared import HeldConstant, ObserverInfo, PreparedState
from pt2e_quant.graph.alias import WrittenPlaces
from pt2e_quant.graph.idioms.attention_masks import MaskInfo, find_masks
from pt2e_quant.graph.meta import attribute, constant_nodes, copy_trace, source_constant
from pt2e_quant.observers.training.trained_qparams import is_fake_quantize


def insert_observers(
    gm: GraphModule,
    quantizer: Any,
    state: PreparedState,
    sources: Mapping[Node, Node],
    *,
    holds: bool,
) -> None:
    """Insert one observer per qparam group into an annotated graph.

    Args:
        gm: annotated; edited in place.
        quantizer: its `prepare_obs_or_fq_callback`, if it has one, may replace observers.
        state: takes what is recorded of each observer.
        sources: folded weights and biases in training, with their constants.
        holds: constants get no observer node where convert can observe them once.
    """
    groups = collect_groups(gm)
    found = gm.meta.pop(MASKS_KEY, None)
    # Putting batch norms back for training changes the graph that annotate saw.
    masks = find_masks(gm) if found is None or state.is_qat else found
    drop_unobservable(gm, groups, masks, as_torchao=state.as_torchao)
    check_groups(groups)
    constants = constant_nodes(gm.graph)
    held: dict[int, nn.Module] = {}
    if holds:
        held = hold_constants(gm, groups, constants, lambda group: make_observer(group, {}))
    observers = make_observers(
        groups.values(), held, is_qat=state.is_qat, by_statistics=state.as_torchao
    )
    check_observers(groups, observers, strict=state.is_strict)
    by_place: dict[EdgeOrNode, nn.Module] = {
        p: observers[g.index] for p, g in groups.items() if g.index not in held
    }
    callback = getattr(quantizer, "prepare_obs_or_fq_callback", None)
    if callback is not None:
        callback(gm, by_place)
    inserter = _Inserter(gm, by_place, groups, state, sources, constants)
    inserter.hold(held)
    inserter.run()


class _Inserter:
    """Puts observers on annotated edges and outputs: one walk, one new name per node."""

    def __init__(
        self,
        gm: GraphModule,
        observers: dict[EdgeOrNode, nn.Module],
        groups: dict[EdgeOrNode, Group],
        state: PreparedState,
        sources: Mapping[Node, Node],
        constants: frozenset[Node],
    ) -> None:
        self.gm = gm
        self.sources = sources
        self.observers = observers
        self.groups = groups
        self.state = state
        self.constants = constants
        self.original: dict[Node, Node] = {}
        self.observer_nodes: dict[tuple[Node, int], Node] = {}
        self.count = 0

    def hold(self, held: Mapping[int, nn.Module]) -> None:
        """List the constants that convert observes instead of observer nodes."""
        edges: dict[tuple[int, Node], list[EdgeOrNode]] = {}
        for place, group in self.groups.items():
            if group.index in held:
                edges.setdefault((group.index, _source_of(place)), []).append(place)
        self.state.constants = [
            HeldConstant(
                observer_info=self._observer_info(places, source, is_constant=True),
                node=source.name,
                readers=tuple(reader_of(place).name for place in places),
                observer=held[index],
            )
            for (index, source), places in edges.items()
        ]

    def run(self) -> None:
        """Walk the graph once."""
        for node in list(self.gm.graph.nodes):
            if Q_ANNOTATION_KEY not in node.meta:
                continue
            self._observe_inputs(node)
            if node in self.observers:
                observed = self._insert(node, node, node)
                node.replace_all_uses_with(observed, lambda user, new=observed: user is not new)

    def _observe_inputs(self, node: Node) -> None:
        swaps: dict[Node, Node] = {}
        for arg in node.all_input_nodes:
            source = arg
            while source in self.original:
                source = self.original[source]
            edge = (source, node)
            if edge not in self.observers or edge not in self.groups:
                continue
            if self.observers.get(source) is self.observers[edge]:
                continue
            swaps[arg] = self._insert(arg, source, edge)
        for old, new in swaps.items():
            node.replace_input_with(old, new)

    def _insert(self, at: Node, source: Node, place: EdgeOrNode) -> Node:
        observer: Any = self.observers[place]
        key = at, id(observer)
        if key in self.observer_nodes:
            self._extend(self.observer_nodes[key], place)
            return self.observer_nodes[key]
        name = f"activation_post_process_{self.count}"
        self.count += 1
        self.gm.add_module(name, observer)
        with self.gm.graph.inserting_after(at):
            made = self.gm.graph.create_node("call_module", name)
        made.args = (at,)
        made.meta["val"] = source.meta.get("val")
        # At inputs and weights a q/dq belongs to its consumer, elsewhere to its producer.
        is_bare = source.op in ("placeholder", "get_attr")
        if is_bare:
            # It computes nothing that the consumer does: what is compared by origin is not it.
            made.meta["from_node"] = [NodeSource(made, "prepare_pt2e", NodeSourceAction.CREATE)]
        copy_trace(made, reader_of(place) if is_bare else source)
        named = self.sources.get(source, source)
        is_constant = named in self.constants
        # What is trained is no constant to its observer.
        if is_constant and not self.state.is_qat and hasattr(observer, "observes_constant"):
            # One constant under one observer: seeing it once is enough.
            places = self.groups[place].places
            observer.observes_constant = all(_source_of(p) is source for p in places)
        self.original[made] = at
        self.observer_nodes[key] = made
        self.state.observer_infos[name] = self._observer_info(
            [place], named, is_constant=is_constant
        )
        return made

    def _observer_info(
        self, places: Sequence[EdgeOrNode], source: Node, *, is_constant: bool
    ) -> ObserverInfo:
        place = places[0]
        return ObserverInfo(
            group=self.groups[place].index,
            role=self._role(place, is_constant),
            rule=str(reader_of(place).meta.get(RULE_KEY, "")),
            uses=tuple(place_name(p) for p in places),
            source=source.name if source.op != "get_attr" else str(source.target),
            is_constant=is_constant,
        )

    def _extend(self, observer_node: Node, place: EdgeOrNode) -> None:
        observer_infos, name = self.state.observer_infos, str(observer_node.target)
        observer_infos[name] = replace(
            observer_infos[name], uses=(*observer_infos[name].uses, place_name(place))
        )

    def _role(self, place: EdgeOrNode, is_constant: bool) -> Role:
        if isinstance(place, Node):
            return Role.OUTPUT
        if not is_constant:
            return Role.INPUT
        spec = self.groups[place].spec
        return Role.BIAS if hasattr(spec, "derived_from") else Role.WEIGHT


def _source_of(place: EdgeOrNode) -> Node:
    return place if isinstance(place, Node) else place[0]


_NO_CALLBACK = "Quantizer.prepare_obs_or_fq_callback"


def may_hold(quantizer: Any, state: PreparedState) -> bool:
    """True if the prepared graph can do without observers of constants.

    It cannot if algorithms read these observers and change the weights, if the quantizer has a
    callback that takes all observers, or in training, where they fake-quantize.
    """
    callback = getattr(quantizer, "prepare_obs_or_fq_callback", None)
    # That of each library's base class does nothing.
    is_none = getattr(callback, "__qualname__", _NO_CALLBACK) == _NO_CALLBACK
    has_readers = bool(state.algorithms)
    return not has_readers and not state.is_qat and is_none


def hold_constants(
    gm: GraphModule,
    groups: Mapping[EdgeOrNode, Group],
    constants: frozenset[Node],
    make: Callable[[Group], nn.Module],
) -> dict[int, nn.Module]:
    """The groups that hold constants only, with their observers; groups of one spec share one.

    Left out are groups that others derive from or that derive themselves, constants with an
    observer of their output, fake-quantizes, and observers that are dynamic, convert themselves or
    leave the constant float.

    Args:
        gm: annotated.
        groups: by place.
        constants: the nodes whose value is fixed.
        make: the observer of a group.

    Returns:
        The observers by the number of the group.
    """
    found = {id(g): g for g in groups.values()}
    sources = {id(s) for g in found.values() for s in g.sources}
    shared: dict[object, nn.Module] = {}
    held: dict[int, Group] = {}
    for group in found.values():
        if id(group) in sources or kind_of(group.spec) is not SpecKind.OBSERVED:
            continue
        if not all(_is_held(place, constants, groups) for place in group.places):
            continue
        key = spec_key(group.spec)
        if key not in shared:
            shared[key] = make(group)
        if _finds_static_qparams(shared[key]):
            held[group.index] = group
    _insert_for_tied(gm, found.values(), held, constants)
    return {index: shared[spec_key(group.spec)] for index, group in held.items()}


def _is_held(
    place: EdgeOrNode, constants: frozenset[Node], groups: Mapping[EdgeOrNode, Group]
) -> bool:
    return not isinstance(place, Node) and place[0] in constants and place[0] not in groups


def _finds_static_qparams(observer: Any) -> bool:
    """True if all that an observer gives convert is the qparams of a static quantize."""
    if is_fake_quantize(observer) or hasattr(observer, "convert"):
        return False
    if not hasattr(observer, "calculate_qparams") or getattr(observer, "is_dynamic", False):
        return False
    dtype = getattr(observer, "dtype", torch.float32)
    return hasattr(observer, "block_qparams") or not dtype.is_floating_point


def _insert_for_tied(
    gm: GraphModule, groups: Any, held: dict[int, Group], constants: frozenset[Node]
) -> None:
    """Give a constant observer nodes everywhere if one of its other uses has an observer node.

    Constants that share storage and qparams are stored once, so one place has to decide that.
    """
    storages = {
        group.index: {
            pointer
            for place in group.places
            if not isinstance(place, Node) and place[0] in constants
            for pointer in _storage(gm, place[0])
        }
        for group in groups
    }
    observed = set().union(*(s for index, s in storages.items() if index not in held))
    waiting = True
    while waiting:
        tied = [index for index in held if storages[index] & observed]
        for index in tied:
            del held[index]
            observed |= storages[index]
        waiting = bool(tied)


def _storage(gm: GraphModule, node: Node) -> list[int]:
    constant = source_constant(node)
    value = None if constant is None else attribute(gm, str(constant.target))
    return [value.untyped_storage().data_ptr()] if isinstance(value, Tensor) else []


def drop_unobservable(
    gm: GraphModule, groups: dict[EdgeOrNode, Group], masks: MaskInfo, *, as_torchao: bool
) -> None:
    """Remove places that hold no float data: integers, masks, destinations of writes.

    With as_torchao, q/dq in front of writes of inputs stay, and a note says what is lost.
    """
    written = WrittenPlaces(gm.graph)
    notes = provenance_of(gm).notes
    for place in list(groups):
        source = place if isinstance(place, Node) else place[0]
        value = source.meta.get("val")
        reason = ""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            reason = "it is no floating-point tensor"
        elif source in masks.masks or source in masks.masked_scores:
            reason = "it carries an attention mask"
        elif as_torchao and place in written.lost:
            notes.append(
                f"{source.name} is quantized as torchao does: the caller's input, which "
                "this graph writes, stays as it was"
            )
        elif found := written.why_not(place):
            reason = f"it {found}"
        if reason:
            group = groups.pop(place)
            group.places.remove(place)
            user = "output" if isinstance(place, Node) else f"input of {place[1].name}"
            notes.append(f"{source.name} ({user}) left float: {reason}")
