"""The leaves of a call, without checking again what an earlier call of its form has shown."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.utils import _pytree as pytree

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import InputError

LIMIT = 256
"""Signatures kept. A program with dynamic sizes can meet any number of them."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where the leaves in placeholder order come from, for one signature.

    Args:
        order: positions among the call's own leaves followed by `literals`; None: as they stand.
        literals: values of the arguments that the call left out.
    """

    order: tuple[int, ...] | None
    literals: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for the call's leaf at a position."""

    at: int


class KnownCalls:
    """Binds calls to a capture; the checks are made once per signature.

    A signature is what the checks look at: how the arguments are nested and named, the shape,
    dtype, layout and device of every tensor, the value of everything else. A call with a
    container or a tensor type that is not torch's or Python's own is checked every time.

    Args:
        capture: the call that the program was captured with.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._plans: dict[Hashable, _Plan] = {}

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call in placeholder order.

        Raises:
            InputError: the inputs do not fit the captured graph, or hold no data.
        """
        leaves: list[Any] = []
        signature: list[Any] = []
        is_plain = _read(args, leaves, signature)
        if kwargs:
            signature.append(tuple(kwargs))
            is_plain = is_plain and _read(kwargs.values(), leaves, signature)
        if not is_plain:
            return self._checked(args, kwargs)
        key = tuple(signature)
        plan = self._plans.get(key)
        if plan is None:
            self._checked(args, kwargs)
            plan = self._plan(args, kwargs)
            if len(self._plans) >= LIMIT:
                self._plans.clear()
            self._plans[key] = plan
        if plan.order is None:
            return leaves
        leaves += plan.literals
        return [leaves[at] for at in plan.order]

    def _checked(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        leaves = self.capture.bind(args, kwargs)
        for info, leaf in zip(self.capture.inputs, leaves, strict=True):
            # A runtime would read where nothing is.
            if isinstance(leaf, Tensor) and leaf.is_meta:
                raise InputError(
                    f'input "{info.path}" is on the meta device: it has no data',
                    fix="give a tensor with values, on the CPU",
                )
        return leaves

    def _plan(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Plan:
        given, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        slots = pytree.tree_unflatten([_Slot(at) for at in range(len(given))], spec)
        arranged = self.capture.arrange(*slots)
        literals = [leaf for leaf in arranged if not isinstance(leaf, _Slot)]
        behind = iter(range(len(given), len(given) + len(literals)))
        order = tuple(leaf.at if isinstance(leaf, _Slot) else next(behind) for leaf in arranged)
        return _Plan(None if order == tuple(range(len(given))) else order, tuple(literals))


def _read(values: Iterable[Any], leaves: list[Any], signature: list[Any]) -> bool:
    """Append the leaves of some arguments and their signature; False: a type is not known here.

    The signature reads one way only: a tensor starts with its shape, all else with its type.
    """
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            leaves.append(value)
            signature += (value.shape, value.dtype, value.layout, value.device)
        elif kind in (int, float, bool, str, type(None)):
            leaves.append(value)
            signature += (kind, value)
        elif kind is tuple or kind is list:
            signature += (kind, len(value))
            if not _read(value, leaves, signature):
                return False
        elif kind is dict:
            signature += (kind, tuple(value))
            if not _read(value.values(), leaves, signature):
                return False
        else:
            return False
    return True


def result_builder(spec: pytree.TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """A function that puts leaves into a result structure.

    A structure of one level, of Python's own containers, takes no walk through pytree.
    """
    if spec.is_leaf():
        return _only
    is_flat = all(spec.child(at).is_leaf() for at in range(spec.num_children))
    if is_flat and spec.type is tuple:
        return tuple
    if is_flat and spec.type is list:
        return list
    if is_flat and spec.type is dict:
        keys = list(spec.context)
        return lambda leaves: dict(zip(keys, leaves, strict=True))
    return lambda leaves: pytree.tree_unflatten(leaves, spec)


def _only(leaves: Sequence[Any]) -> Any:
    (leaf,) = leaves
    return leaf
