"""Put the observers of annotated places into a graph, and note what each is for."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.traceback import NodeSource, NodeSourceAction

from pt2e_quant.core.schemes import Role
from pt2e_quant.core.specs import Q_ANNOTATION_KEY, EdgeOrNode
from pt2e_quant.flow.annotate.groups import Group
from pt2e_quant.flow.annotate.table_quantizer import RULE_KEY
from pt2e_quant.flow.prepare.prepared import HeldConstant, ObserverInfo, PreparedState
from pt2e_quant.graph.meta import copy_trace


class Inserter:
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
        self.hung: dict[tuple[Node, int], Node] = {}
        self.count = 0

    def hold(self, held: Mapping[int, nn.Module]) -> None:
        """Note what convert has to look at, in the place of observer nodes."""
        edges: dict[tuple[int, Node], list[EdgeOrNode]] = {}
        for place, group in self.groups.items():
            if group.index in held:
                edges.setdefault((group.index, _source_of(place)), []).append(place)
        self.state.constants = [
            HeldConstant(
                observer_info=self._observer_info(places, source, is_constant=True),
                node=source.name,
                readers=tuple(_user_of(place).name for place in places),
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
        if key in self.hung:
            self._extend(self.hung[key], place)
            return self.hung[key]
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
        copy_trace(made, _user_of(place) if is_bare else source)
        named = self.sources.get(source, source)
        is_constant = named in self.constants
        # What is trained is no constant to its observer.
        if is_constant and not self.state.is_qat and hasattr(observer, "observes_constant"):
            # One constant under one observer: seeing it once is enough.
            places = self.groups[place].places
            observer.observes_constant = all(_source_of(p) is source for p in places)
        self.original[made] = at
        self.hung[key] = made
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
            rule=str(_user_of(place).meta.get(RULE_KEY, "")),
            uses=tuple(_shown(p) for p in places),
            source=source.name if source.op != "get_attr" else str(source.target),
            is_constant=is_constant,
        )

    def _extend(self, observer_node: Node, place: EdgeOrNode) -> None:
        observer_infos, name = self.state.observer_infos, str(observer_node.target)
        observer_infos[name] = replace(
            observer_infos[name], uses=(*observer_infos[name].uses, _shown(place))
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


def _user_of(place: EdgeOrNode) -> Node:
    return place if isinstance(place, Node) else place[1]


def _shown(place: EdgeOrNode) -> str:
    return place.name if isinstance(place, Node) else f"{place[0].name} -> {place[1].name}"
