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
from pt2e_quant.graph.ops import (
    ADDMM,
    BMM,
    CONV,
    CONV_TRANSPOSE,
    LINEAR,
    MATMUL,
    MM,
    PRELU,
    SDPA,
    aten,
    is_call,
    is_getitem,
)
from pt2e_quant.graph.pipeline import HAS_VALUES, Invariant, Note, PassResult, graph_pass
from pt2e_quant.graph.subgraphs import copy_graph

_LOWER_PRECISION = (
    *CONV,
    *CONV_TRANSPOSE,
    *LINEAR,
    *MATMUL,
    *MM,
    *BMM,
    *ADDMM,
    *SDPA,
    *PRELU,
    aten.baddbmm.default,
    aten.addbmm.default,
    aten.addmv.default,
    aten.mv.default,
    aten.einsum.default,
    aten.chain_matmul.default,
    aten.linalg_vecdot.default,
)
"""Operators that autocast runs in its own dtype (PyTorch's autocast op reference).

Their fake kernels do not refuse mixed dtypes, so these are cast without asking what they give.
"""

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
    """True if autocast changes the dtype of a value: floats do, doubles do not."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


class _Casts:
    """The casts of one autocast region, each value cast once to each dtype.

    Args:
        editor: edits the graph that the casts go into.
        dtype: the region's own dtype.
    """

    def __init__(self, editor: Editor, dtype: torch.dtype) -> None:
        self.editor = editor
        self.dtype = dtype
        self.done: dict[tuple[Node, torch.dtype], Node] = {}
        # torch.export records the values of regions in branches as they are without autocast.
        self.recorded = True

    def _wanted(self, inner: Node, args: Any, kwargs: Any) -> torch.dtype | None:
        """The dtype to cast a call's inputs to, None if autocast leaves them."""
        value = inner.meta.get("val")
        if not isinstance(value, Tensor) or not _is_castable(value):
            return None
        if is_call(inner, _LOWER_PRECISION):
            self.recorded = self.recorded and value.dtype == self.dtype
            return self.dtype
        if not self.recorded:
            return None
        plain = fake_value(self.editor.mode, inner.target, args, kwargs)
        same = isinstance(plain, Tensor) and plain.dtype == value.dtype
        return None if same else value.dtype

    def arguments(self, inner: Node, args: Any, kwargs: Any, place: Node) -> tuple[Any, Any]:
        """The arguments with which a call gives the same without autocast as with it."""
        dtype = self._wanted(inner, args, kwargs)
        if dtype is None:
            return args, kwargs

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


def _cast_branch(body: GraphModule, dtype: torch.dtype) -> None:
    """Write the casts of an autocast region into a branch that runs in it."""
    editor = Editor(body)
    casts = _Casts(editor, dtype)
    for node in list(body.graph.nodes):
        if node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
            continue
        node.args, node.kwargs = casts.arguments(node, node.args, node.kwargs, node)
        if not casts.recorded:
            node.meta["val"] = fake_value(editor.mode, node.target, node.args, node.kwargs)
    editor.finish()


class Inliner:
    """Inlines the regions of one graph, outermost first: an inner autocast overrides an outer."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.editor = Editor(gm)
        self.notes: list[Note] = []
        self.dead_bodies: set[str] = set()
        self._hoisted: dict[Node, Node] = {}

    def run(self) -> None:
        """Inline every region."""
        for node in list(self.gm.graph.nodes):
            if _region(node) is not None:
                self._inline(node)
        reading = {str(n.target) for n in self.gm.graph.nodes if n.op == "get_attr"}
        for name in self.dead_bodies - reading:
            self.gm.delete_submodule(name)

    def _inline(self, call: Node) -> None:
        before = self.editor.mark()
        reader, body = _body_of(call)
        operands = list(call.args[_position(call) + 1 :])
        results = self.copy(body, operands, call, self._casts(call, None))
        for user in list(call.users):
            if not is_getitem(user):
                raise InvariantError(f"{user.name} reads {call.name} as a whole", node=user)
            index: Any = user.args[1]
            give(self.editor, user, results[index])
            self.editor.erase_dead([user])
        self.editor.erase_dead([call])
        self.editor.erase_dead([reader])
        self.dead_bodies.add(str(reader.target))
        self.notes.append(Note(call.name, f"inlined {self.editor.mark() - before} calls"))

    def _casts(self, call: Node, outer: _Casts | None) -> _Casts | None:
        """The casts that hold in a region inside another."""
        if _region(call) == _GRAD:
            return outer
        dtype, enabled = call.args[1:3]
        if not enabled:
            return None
        if dtype is None:
            dtype = torch.get_autocast_dtype(str(call.args[0]))
        assert isinstance(dtype, torch.dtype)
        return _Casts(self.editor, dtype)

    def copy(
        self, body: GraphModule, operands: list[Any], call: Node, casts: _Casts | None = None
    ) -> list[Any]:
        """Copy a body in front of a call; its constants are held once however often it is copied.

        The bodies that it calls itself are other copies each time, as each call has its own.

        Args:
            body: the body.
            operands: what its placeholders are.
            call: the call, in the graph that is edited.
            casts: those of the autocast region around it.

        Returns:
            Its results.
        """
        found: dict[Node, Any] = {}
        waiting = iter(operands)
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                found[inner] = next(waiting)
            elif inner.op == "output":
                results = map_arg(inner.args[0], found.__getitem__)
                return list(results) if isinstance(results, (list, tuple)) else [results]
            elif inner.op == "get_attr":
                if not all(_region(user) for user in inner.users):
                    found[inner] = self._hoist(body, inner)
            elif _region(inner) is not None:
                mapped: Any = map_arg(inner.args[_position(inner) + 1 :], found.__getitem__)
                within = self._casts(inner, casts)
                found[inner] = self.copy(_body_of(inner)[1], list(mapped), call, within)
            elif is_getitem(inner) and isinstance(found[_source(inner)], list):
                found[inner] = found[_source(inner)][inner.args[1]]
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
        given: dict[str, Any] = {"val": inner.meta.get("val")}
        target: Any = inner.target
        if casts is not None and isinstance(inner.target, HigherOrderOperator):
            for branch in inner.all_input_nodes:
                body = subgraph_of(branch)
                if body is not None:
                    _cast_branch(body, casts.dtype)
        elif casts is not None:
            args, kwargs = casts.arguments(inner, args, kwargs, call)
            if not casts.recorded:
                given.clear()
        return self.editor.call(target, *args, like=inner, before=call, **given, **kwargs)

    def _hoist(self, body: GraphModule, inner: Node) -> Node:
        """Bring a constant or a body of a branch to the graph around it."""
        name = str(inner.target)
        called = subgraph_of(inner)
        if called is not None:
            return self.editor.submodule(name, copy_graph(called), like=inner)
        if inner not in self._hoisted:
            self._hoisted[inner] = self.editor.constant(name, attribute(body, name), like=inner)
        return self._hoisted[inner]


def give(editor: Editor, getitem: Node, result: Any) -> None:
    """Let the readers of a region's result read what the inlined body computes, or its literal."""
    if isinstance(result, Node):
        editor.replace(getitem, result)
        return

    def literal(node: Node) -> Any:
        return result if node is getitem else node

    for reader in list(getitem.users):
        reader.args, reader.kwargs = map_arg(reader.args, literal), map_arg(reader.kwargs, literal)


def _position(call: Node) -> int:
    """Return the place of the body among a region's arguments; the operands follow it."""
    return 1 if _region(call) == _GRAD else 4


def _body_of(call: Node) -> tuple[Node, GraphModule]:
    reader: Any = call.args[_position(call)]
    body = subgraph_of(reader)
    if body is None:
        raise InvariantError(f"{call.name} names no body", node=call)
    return reader, body


def _source(getitem: Node) -> Node:
    source = getitem.args[0]
    assert isinstance(source, Node)
    return source


def _inline_all(gm: GraphModule) -> list[Note]:
    notes: list[Note] = []
    if _check(gm) is not None:
        inliner = Inliner(gm)
        inliner.run()
        inliner.editor.finish()
        notes += inliner.notes
    for node in list(gm.graph.nodes):
        body = subgraph_of(node)
        if body is not None:
            notes += _inline_all(body)
    return notes


@graph_pass(needs=(HAS_VALUES,), gives=(no_regions,))
def inline_regions(gm: GraphModule) -> PassResult:
    """Replace each grad-mode or autocast region by its body, nested ones and those in branches.

    The dtypes that autocast gave while tracing are kept by casts: where an operator without
    autocast would give another dtype, its float inputs are cast first.

    Before:  r = wrap_with_autocast(cpu, bf16, True, False, body, x, w); y = getitem(r, 0)
    After:   y = linear(to(x, bf16), to(w, bf16))
    """
    notes = _inline_all(gm)
    return PassResult(changed=bool(notes), notes=tuple(notes))
