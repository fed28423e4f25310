"""Which constants convert looks at by itself, with no observer of theirs in the prepared graph.

A constant is the same in every batch. Where nothing in the prepared graph has to read what is known
of it, an observer node there is a call a batch, a line of code and a node to make and erase again.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2e_quant.core.specs import EdgeOrNode, SpecKind, kind_of
from pt2e_quant.flow.annotate.groups import Group
from pt2e_quant.flow.prepare.make_observer import spec_key
from pt2e_quant.flow.prepare.prepared import PreparedState
from pt2e_quant.graph.meta import attribute, source_constant
from pt2e_quant.observers.training.trained_qparams import is_fake_quantize

_NO_CALLBACK = "Quantizer.prepare_obs_or_fq_callback"


def may_hold(quantizer: Any, state: PreparedState) -> bool:
    """Whether nothing of a quantizer asks for observers of constants in the prepared graph.

    Its algorithms read them and change weights under them; a callback is handed all of them; in
    training they quantize.
    """
    callback = getattr(quantizer, "prepare_obs_or_fq_callback", None)
    # That of each library's base class does nothing.
    is_none = getattr(callback, "__qualname__", _NO_CALLBACK) == _NO_CALLBACK
    has_readers = any(algorithm.needs_data for algorithm in state.algorithms)
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
        if _only_looks(shared[key]):
            held[group.index] = group
    _let_go_of_tied(gm, found.values(), held, constants)
    return {index: shared[spec_key(group.spec)] for index, group in held.items()}


def _is_held(
    place: EdgeOrNode, constants: frozenset[Node], groups: Mapping[EdgeOrNode, Group]
) -> bool:
    return not isinstance(place, Node) and place[0] in constants and place[0] not in groups


def _only_looks(observer: Any) -> bool:
    """Whether an observer does nothing but find qparams, which become a static quantize."""
    if is_fake_quantize(observer) or hasattr(observer, "convert"):
        return False
    if not hasattr(observer, "calculate_qparams") or getattr(observer, "is_dynamic", False):
        return False
    dtype = getattr(observer, "dtype", torch.float32)
    return hasattr(observer, "block_qparams") or not dtype.is_floating_point


def _let_go_of_tied(
    gm: GraphModule, groups: Any, held: dict[int, Group], constants: frozenset[Node]
) -> None:
    """Observe a constant in the graph everywhere if another place of it is observed there.

    What shares its storage and its qparams is stored once: that is decided in one place.
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
