"""Batch edits of one graph: new nodes get metadata and unique names; one recompile at the end."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.core.errors import InvariantError
from pt2e_quant.graph.meta import (
    attribute,
    copy_trace,
    fake_cast,
    fake_constant,
    fake_mode_of,
    fake_value,
)

DEFER_RECOMPILE = "pt2e_quant.defer_recompile"
"""Key in `gm.meta` that makes `Editor.finish` leave the recompile to the pass driver."""

_UNSET: Any = object()


class Editor:
    """Edits a graph module's graph; call `finish` once at the end.

    Nodes that were replaced may still be named in arguments: they stand for their replacement.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.graph = gm.graph
        self.mode = fake_mode_of(self.graph)
        self.changed = False
        self.cursor: Node | None = None
        self.declined: list[str] = []
        self._replaced: dict[Node, Node] = {}
        self._candidates: dict[Node, None] = {}
        self._created: list[Node] = []
        self._next_suffix: dict[str, int] = {}
        self._fakes: dict[Any, Tensor] = {}
        self._values: dict[str, Any] = {}
        self._last_constant: Node | None = None
        self._names_of_target: dict[str, int] | None = None

    def now(self, node: Node) -> Node:
        """The current replacement of a node; the node itself if it was not replaced."""
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def call(
        self,
        target: Any,
        *args: Any,
        like: Node,
        before: Node | None = None,
        after: Node | None = None,
        val: Any = _UNSET,
        **kwargs: Any,
    ) -> Node:
        """Insert a call.

        Args:
            target: the overload to call.
            args: its arguments.
            like: the node whose module stack and stack trace it takes.
            before: the node to insert it before; without `before` and `after`, the anchor of
                the match being rewritten, else `like`.
            after: the node to insert it after.
            val: its fake value if known (`like.meta["val"]` when it takes the place of `like`);
                computed on the arguments' fake values otherwise.
            kwargs: its keyword arguments.
        """
        if self._replaced:
            args, kwargs = map_arg(args, self.now), map_arg(kwargs, self.now)
        place = before or (after and _after(after)) or self.cursor or self.now(like)
        with self.graph.inserting_before(place):
            node = self.graph.create_node("call_function", target, name=operator_name(target))
        # Not at creation: torch.fx looks for symbols in a flattened copy there.
        node.args = args
        if kwargs:
            node.kwargs = kwargs
        copy_trace(node, like)
        node.meta["val"] = val if val is not _UNSET else self._value(target, args, kwargs)
        self._created.append(node)
        self.changed = True
        return node

    def _value(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The fake value of a call; equal calls on equal shapes are computed once."""
        key = repr((str(target), map_arg(args, _described), map_arg(kwargs, _described)))
        if key not in self._values:
            self._values[key] = fake_value(self.mode, target, args, kwargs)
        return self._values[key]

    def fake_like(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A fake value of another's shape and layout; nodes of equal ones share it."""
        # Strides are numbers of their own: a view of a fixed shape may have a symbol there.
        if not all(type(length) is int for length in (*like.shape, *like.stride())):
            return fake_cast(like, dtype)
        key = like.shape, like.stride(), dtype, like.device
        if key not in self._fakes:
            is_fake = isinstance(like, FakeTensor)
            made = fake_cast(like, dtype) if is_fake else fake_constant(self.mode, like)
            self._fakes[key] = made
        return self._fakes[key]

    def constant(self, name: str, tensor: Tensor, *, like: Node | None = None) -> Node:
        """Register a new tensor under a dotted name and return the node that reads it.

        A name that is taken gets a numbered suffix. An `nn.Parameter` becomes a parameter,
        any other tensor a buffer.
        """
        target = self.unique_name(name)
        owner, leaf = self._owner(target)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(leaf, tensor)
        else:
            owner.register_buffer(leaf, tensor)
        return self._read(target, tensor, like)

    def submodule(self, name: str, module: nn.Module, *, like: Node) -> Node:
        """Register a module (the body of a branch) and return the node that reads it."""
        target = self.unique_name(name)
        owner, leaf = self._owner(target)
        owner.add_module(leaf, module)
        return self._read(target, None, like)

    def rebind(self, old: Node, tensor: Tensor, *, reader: Node) -> Node:
        """Give one reader of a constant a new tensor, under the same name where possible.

        The name is rebound if nothing but `reader` uses it; otherwise a new name is made. The
        old tensor is not written. The new one is a parameter if the old one is.
        """
        target = str(old.target)
        current = attribute(self.gm, target)
        if isinstance(current, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=current.requires_grad)
        if set(old.users) != {reader} or self._nodes_reading(target) > 1:
            return self.constant(target, tensor, like=old)
        owner, leaf = self._owner(target)
        if isinstance(tensor, nn.Parameter):
            owner.register_parameter(leaf, tensor)
        elif leaf in owner._buffers:
            owner._buffers[leaf] = tensor
        else:
            setattr(owner, leaf, tensor)
        old.meta.pop("tensor_meta", None)
        old.meta["val"] = self.fake_like(tensor, tensor.dtype)
        self.changed = True
        return old

    def replace(self, old: Node, new: Node, *, except_in: Iterable[Node] = ()) -> None:
        """Let every reader of `old` read `new` instead; `old` goes when nothing reads it."""
        new = self.now(new)
        spared = set(except_in)
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in spared)
        if not old.users:
            self._replaced[old] = new
        self._candidates[old] = None
        self.changed = True

    def decline(self, reason: str) -> None:
        """Note why something was not done in a match that is rewritten in another way."""
        self.declined.append(reason)

    def discard(self, nodes: Iterable[Node]) -> None:
        """Mark nodes that `finish` erases if nothing reads them."""
        self._candidates.update(dict.fromkeys(nodes))

    def erase_dead(self, nodes: Iterable[Node]) -> None:
        """Erase those nodes that nothing reads, and pure producers that this leaves unread."""
        stack = list(nodes)
        named = set(stack)
        while stack:
            node = stack.pop()
            if node._erased or node.users or node.op in ("placeholder", "output"):
                continue
            if node not in named and node.is_impure():
                continue
            stack.extend(node.all_input_nodes)
            self.graph.erase_node(node)
            self._candidates.pop(node, None)
            self.changed = True

    def mark(self) -> int:
        """A point to which `roll_back` can return."""
        return len(self._created)

    def roll_back(self, mark: int) -> None:
        """Erase the calls inserted since a mark that nothing outside them reads."""
        for node in reversed(self._created[mark:]):
            if not node._erased and not node.users:
                self.graph.erase_node(node)
        del self._created[mark:]

    def unique_name(self, name: str) -> str:
        """The dotted name, with a numbered suffix if it is taken; constant time on average."""
        if not self._is_taken(name):
            return name
        suffix = self._next_suffix.get(name, 1)
        while attribute(self.gm, f"{name}_{suffix}") is not None:
            suffix += 1
        self._next_suffix[name] = suffix + 1
        return f"{name}_{suffix}"

    def finish(self) -> bool:
        """Erase what was left without readers, recompile once; returns whether anything changed."""
        self.erase_dead(reversed(list(self._candidates)))
        if self.changed and DEFER_RECOMPILE not in self.gm.meta:
            recompile(self.gm)
        return self.changed

    def _is_taken(self, name: str) -> bool:
        """True if a name is an attribute, also one that holds None (a missing bias)."""
        owner_name, _, leaf = name.rpartition(".")
        owner = attribute(self.gm, owner_name) if owner_name else self.gm
        if not isinstance(owner, nn.Module):
            return owner is not None and getattr(owner, leaf, None) is not None
        tables = (vars(owner), owner._parameters, owner._buffers, owner._modules)
        return any(leaf in table for table in tables) or hasattr(type(owner), leaf)

    def _owner(self, target: str) -> tuple[nn.Module, str]:
        """The module that holds a dotted name, made if absent, and the last part of the name."""
        owner: nn.Module = self.gm
        *path, leaf = target.split(".")
        for part in path:
            child = attribute(owner, part)
            if child is None:
                child = nn.Module()
                owner.add_module(part, child)
            if not isinstance(child, nn.Module):
                raise InvariantError(f'"{part}" in "{target}" is not a module')
            owner = child
        return owner, leaf

    def _read(self, target: str, tensor: Tensor | None, like: Node | None) -> Node:
        last = self._last_constant
        place = next(iter(self.graph.nodes)) if last is None or last._erased else last.next
        with self.graph.inserting_before(place):
            node = self.graph.create_node("get_attr", target, name=target.replace(".", "_"))
        self._last_constant = node
        if tensor is not None:
            node.meta["val"] = self.fake_like(tensor, tensor.dtype)
        if like is not None:
            copy_trace(node, like)
        if self._names_of_target is not None:
            self._names_of_target[target] = self._names_of_target.get(target, 0) + 1
        self.changed = True
        return node

    def _nodes_reading(self, target: str) -> int:
        """Return the number of `get_attr` nodes that name a target; all are counted once."""
        if self._names_of_target is None:
            self._names_of_target = {}
            for node in self.graph.nodes:
                if node.op == "get_attr":
                    name = str(node.target)
                    self._names_of_target[name] = self._names_of_target.get(name, 0) + 1
        return self._names_of_target[target]


@cache
def operator_name(target: Any) -> str:
    """The operator without namespace and overload, as the base of a node's name."""
    if isinstance(target, OpOverload):
        return str(target._schema.name.rpartition("::")[2])
    return str(getattr(target, "__name__", "call"))


def _described(node: Node) -> Any:
    """A key of everything in an input that the fake value of a call depends on."""
    value = node.meta.get("val")
    if isinstance(value, Tensor):
        return f"<{value.dtype} {value.device} {value.shape} {value.stride()}>"
    return f"<{value}>" if value is not None else f"<{node.name}>"


def _after(node: Node) -> Node:
    """The node before which to insert so that it stands after `node` and after all inputs."""
    place = node.next
    while place.op == "placeholder":
        place = place.next
    return place
