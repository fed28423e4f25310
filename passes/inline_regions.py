"""Inline `no_grad` and autocast regions, with the casts of autocast written out."""

from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.core.errors import InvariantError
from pt2e_quant.graph.alias import subgraph_of
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute, fake_value
from pt2e_quant.graph.ops import aten, is_getitem
from pt2e_quant.graph.pipeline import Invariant, Note, PassResult, graph_pass

__all__ = ["inline_regions", "no_regions"]

_GRAD = "wrap_with_set_grad_enabled"
_AUTOCAST = "wrap_with_autocast"


def _region(node: Node) -> str | None:
    """The name of the region operator that a node calls, None if it calls none."""
    if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
        return None
    name = str(node.target.__name__)
    return name if name in (_GRAD, _AUTOCAST) else None


def _check(gm: GraphModule) -> str | None:
    left = [node.name for node in gm.graph.nodes if _region(node) is not None]
    return ", ".join(left) or None


no_regions = Invariant("no grad-mode or autocast region is left", _check)


def _is_castable(value: object) -> bool:
    """Whether autocast changes the dtype of a value: floats do, doubles do not."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


class _Casts:
    """The casts of one autocast region, each value cast once to each dtype."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor
        self.done: dict[tuple[Node, torch.dtype], Node] = {}

    def arguments(self, inner: Node, args: Any, kwargs: Any, place: Node) -> tuple[Any, Any]:
        """The arguments with which a call gives, without autocast, the dtype it gave with it."""
        wanted = inner.meta.get("val")
        if not _is_castable(wanted) or not isinstance(wanted, Tensor):
            return args, kwargs
        try:
            plain = fake_value(self.editor.mode, inner.target, args, kwargs)
        except (RuntimeError, TypeError):  # mixed dtypes, which only autocast makes equal
            plain = None
        if isinstance(plain, Tensor) and plain.dtype == wanted.dtype:
            return args, kwargs
        dtype = wanted.dtype

        def cast(node: Node) -> Node:
            value = node.meta.get("val")
            if value is None or not _is_castable(value) or value.dtype == dtype:
                return node
            key = (node, dtype)
            if key not in self.done:
                self.done[key] = self.editor.call(
                    aten.to.dtype, node, dtype, like=inner, before=place
                )
            return self.done[key]

        return map_arg(args, cast), map_arg(kwargs, cast)


class _Inliner:
    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.editor = Editor(gm)
        self.notes: list[Note] = []
        self.dead_bodies: set[str] = set()

    def run(self) -> None:
        for node in list(self.gm.graph.nodes):
            kind = _region(node)
            if kind is not None:
                self._inline(node, kind)
        reading = {str(n.target) for n in self.gm.graph.nodes if n.op == "get_attr"}
        for name in self.dead_bodies - reading:
            self.gm.delete_submodule(name)

    def _inline(self, call: Node, kind: str) -> None:
        position = 1 if kind == _GRAD else 4
        reader: Any = call.args[position]
        body = subgraph_of(reader)
        if body is None:
            raise InvariantError(f"{call.name} names no body", node=call)
        casts = _Casts(self.editor) if kind == _AUTOCAST and call.args[2] else None
        results = self._copy(body, list(call.args[position + 1 :]), call, casts)
        for user in list(call.users):
            if not is_getitem(user):
                raise InvariantError(f"{user.name} reads {call.name} as a whole", node=user)
            index: Any = user.args[1]
            self.editor.replace(user, results[index])
            self.editor.erase_dead([user])
        self.editor.erase_dead([call])
        self.editor.erase_dead([reader])
        self.dead_bodies.add(str(reader.target))
        self.notes.append(Note(call.name, f"inlined {len(body.graph.nodes)} nodes"))

    def _copy(
        self, body: GraphModule, operands: list[Any], call: Node, casts: _Casts | None
    ) -> list[Any]:
        """Copy a body before its call; returns its results."""
        found: dict[Node, Any] = {}
        waiting = iter(operands)
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                found[inner] = next(waiting)
            elif inner.op == "output":
                results = map_arg(inner.args[0], found.__getitem__)
                return list(results) if isinstance(results, (list, tuple)) else [results]
            elif inner.op == "get_attr":
                found[inner] = self._hoist(body, inner)
            else:
                found[inner] = self._copy_call(inner, found, call, casts)
        raise InvariantError(f"the body of {call.name} has no output", node=call)

    def _copy_call(
        self, inner: Node, found: dict[Node, Any], call: Node, casts: _Casts | None
    ) -> Node:
        if inner.op != "call_function":
            raise InvariantError(f"{inner.op} {inner.target} inside {call.name}", node=inner)
        args: Any = map_arg(inner.args, found.__getitem__)
        kwargs: Any = map_arg(inner.kwargs, found.__getitem__)
        if casts is not None and not isinstance(inner.target, HigherOrderOperator):
            args, kwargs = casts.arguments(inner, args, kwargs, call)
        val = inner.meta.get("val")
        return self.editor.call(inner.target, *args, like=inner, before=call, val=val, **kwargs)

    def _hoist(self, body: GraphModule, inner: Node) -> Node:
        """Bring a constant or a body of a body to the graph around it."""
        value = attribute(body, str(inner.target))
        if isinstance(value, Tensor):
            return self.editor.constant(str(inner.target), value, like=inner)
        return self.editor.submodule(str(inner.target), value, like=inner)


def _inline_all(gm: GraphModule) -> list[Note]:
    notes: list[Note] = []
    for node in list(gm.graph.nodes):
        body = subgraph_of(node)
        if body is not None:
            inner = _inline_all(body)
            if inner:
                body.recompile()
            notes += inner
    if _check(gm) is None:
        return notes
    inliner = _Inliner(gm)
    inliner.run()
    inliner.editor.finish()
    return notes + inliner.notes


@graph_pass(gives=(no_regions,))
def inline_regions(gm: GraphModule) -> PassResult:
    """Replace each grad-mode or autocast region by its body, nested ones and those in branches.

    The dtypes that autocast gave while tracing are kept by casts: where an operator without
    autocast would give another dtype, its float inputs are cast first.

    Before:  r = wrap_with_autocast(cpu, bf16, True, False, body, x, w); y = getitem(r, 0)
    After:   y = linear(to(x, bf16), to(w, bf16))
    """
    notes = _inline_all(gm)
    return PassResult(changed=bool(notes), notes=tuple(notes))
