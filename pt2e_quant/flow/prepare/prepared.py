"""The state that prepare leaves in `gm.meta` for calibrate and convert."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.schemes import Role
from pt2e_quant.graph.pipeline import GraphPass
from pt2e_quant.graph.subgraphs import bodies
from pt2e_quant.passes.algorithms.algorithm import Algorithm

PREPARED_KEY = "pt2e_quant.prepared"
"""The key of `gm.meta` that holds a PreparedState."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverInfo:
    """One observer node: its qparam group, and the rule that asked for it.

    Args:
        group: number of the qparam group.
        role: what the tensor is to the first operator that asked.
        rule: which rule asked.
        uses: the places it serves, as text.
        source: name of the observed node.
        is_constant: the observed value never changes.
    """

    group: int
    role: Role
    rule: str
    uses: tuple[str, ...]
    source: str
    is_constant: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldConstant:
    """A constant without an observer node: convert observes it once.

    Args:
        observer_info: as that of an observer node.
        node: name of the node that holds the constant.
        readers: names of the nodes that are to read it quantized.
        observer: finds its qparams. Constants of equal specs, and copies of the graph, share this
            module, so convert observes with a copy of it.
    """

    observer_info: ObserverInfo
    node: str
    readers: tuple[str, ...]
    observer: nn.Module


FOLDED_KEY = "pt2e_quant_folded"
"""Key in a graph's `meta` of the names of constants that others took in, such as batch norms'."""

REWRITTEN_KEY = "pt2e_quant_rewritten"
"""Key in a graph's `meta` of the names of constants that have taken in others, or a factor."""

HALF_CONVERTED = "half converted"
"""Replaces a graph's PreparedState when its convert is interrupted (by Ctrl-C)."""


@dataclass(slots=True, kw_only=True)
class PreparedState:
    """The observers and held constants of a graph, and what convert has to run.

    Args:
        observer_infos: by name of the observer node.
        constants: those that have no observer node.
        algorithms: those that convert runs before q/dq are made.
        asked_algorithms: the names of those that somebody asked for, beyond a recipe's own.
        finishing: passes of the quantizer on the q/dq graph.
        placing: passes of the quantizer that take operators out of integers.
        is_strict: refuse an observer without data; otherwise warn.
        is_qat: prepared for training.
        as_torchao: convert to the form that torchao's PT2E gives, and after training by the
            qparams that the statistics call for, instead of those that it trained with.
        int_only: convert refuses a result that computes in float.
    """

    observer_infos: dict[str, ObserverInfo] = field(default_factory=dict)
    constants: list[HeldConstant] = field(default_factory=list)
    algorithms: tuple[Algorithm, ...] = ()
    asked_algorithms: tuple[str, ...] = ()
    finishing: tuple[GraphPass, ...] = ()
    placing: tuple[GraphPass, ...] = ()
    is_strict: bool = True
    is_qat: bool = False
    as_torchao: bool = False
    int_only: bool = False


def prepared_state(gm: GraphModule) -> PreparedState:
    """The state of a prepared graph.

    Raises:
        ConfigError: the graph was not prepared here.
    """
    state = gm.meta.get(PREPARED_KEY)
    if state is HALF_CONVERTED:
        raise ConfigError(
            "an earlier convert_pt2e of this graph was stopped half way: it is no prepared graph "
            "any more, and no converted one",
            fix="prepare and calibrate again; a program that pq.save wrote before convert can be "
            "loaded",
        )
    if not isinstance(state, PreparedState):
        raise ConfigError(
            "this graph was not prepared by prepare_pt2e",
            fix="prepared = prepare_pt2e(torch.export.export(model, inputs), quantizer)",
        )
    return state


def own_observers(state: PreparedState) -> None:
    """Give the held constants of each group an observer that no other group shares."""
    made: dict[int, nn.Module] = {}
    for constant in state.constants:
        if constant.observer_info.group not in made:
            made[constant.observer_info.group] = copy.deepcopy(constant.observer)
    state.constants = [replace(c, observer=made[c.observer_info.group]) for c in state.constants]


def prepared_graphs(gm: GraphModule) -> Iterator[GraphModule]:
    """A prepared graph, and the bodies of its control flow, outermost first."""
    yield gm
    for body in bodies(gm):
        yield body.gm


def observed_node(node: Node) -> Node:
    """The node that an observer node observes."""
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def is_observer(module: object) -> bool:
    """True if a module is an observer or fake-quantize, ours or another library's."""
    return isinstance(module, nn.Module) and hasattr(module, "calculate_qparams")


def observers_of(gm: GraphModule) -> Iterator[tuple[Node, Any]]:
    """The observer nodes of a graph with their modules, in graph order."""
    for node in gm.graph.nodes:
        if node.op == "call_module":
            module = gm.get_submodule(str(node.target))
            if is_observer(module):
                yield node, module
