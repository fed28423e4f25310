"""Make in-place operators on activations out-of-place, through views and slice writes too.

Restore them in converted graphs where nothing else can see the write.
"""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.graph.alias import aliased_argument, mutated_roots, roots, writes
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import aten, is_call, is_getitem, is_in_place, out_of_place
from pt2e_quant.graph.pipeline import HAS_VALUES, Invariant, Note, PassResult, graph_pass
from pt2e_quant.graph.views import (
    can_write_through,
    dtype_of,
    is_copy,
    retaken,
    same_view,
    write_through,
)

WAS_IN_PLACE = "pt2e_quant.was_in_place"
"""The key of `node.meta` of operators that were made out-of-place."""


class _Aliases:
    """The values that share storage; views are told from copies by layout."""

    def __init__(self, gm: GraphModule, editor: Editor) -> None:
        self.source: dict[Node, Node] = {}
        self.root: dict[Node, Node] = {}
        may_share = roots(gm.graph)
        suspects = mutated_roots(gm.graph)
        for node in gm.graph.nodes:
            source = None
            if node.op == "call_function" and may_share[node] in suspects:
                source = aliased_argument(node)
                if source is not None and is_copy(node, editor):
                    source = None
            if source is not None:
                self.source[node] = source
            self.root[node] = node if source is None else self.root[source]

    def chain(self, node: Node) -> list[Node]:
        """The views from a value to the one whose storage it shares, the value first."""
        found = []
        while node in self.source:
            found.append(node)
            node = self.source[node]
        return found


def _why_not(node: Node, value: Node, aliases: _Aliases) -> str | None:
    """Why a write of a value cannot be made out-of-place, None if it can."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or not is_in_place(target):
        return f"{node.name} writes an activation and is no in-place operator"
    if torch.Tag.inplace_view in target.tags and target is not aten.detach_.default:
        return f"{node.name} changes the shape of a value in place"
    if out_of_place(target) is None:
        return f"{node.name} has no out-of-place form"
    for view in aliases.chain(value):
        if not (is_in_place_result(view) or is_call_of_pieces(view) or can_write_through(view)):
            return f"{node.name} writes through {view.name}, a view that cannot be undone"
    return None


def is_in_place_result(node: Node) -> bool:
    """True if a node is the value that an in-place operator has written."""
    return isinstance(node.target, torch._ops.OpOverload) and is_in_place(node.target)


def is_call_of_pieces(node: Node) -> bool:
    """True if a node is a tuple of views, whose elements are read by getitem."""
    return isinstance(node.meta.get("val"), (list, tuple))


class _Storage:
    """The values of one mutated storage and its views while the walk passes its writes."""

    def __init__(self, root: Node, aliases: _Aliases, editor: Editor) -> None:
        self.root = root
        self.version = 0
        self.editor = editor
        self.aliases = aliases
        self.same: dict[Node, Node] = {root: root}
        self.values: dict[Node, tuple[Node, int]] = {root: (root, 0)}
        self.views: dict[tuple[object, ...], Node] = {}
        self.pieces: dict[Node, int] = {}

    def source(self, view: Node) -> Node:
        """The value that a view is taken of; a split's elements are views of what it splits."""
        source = self.aliases.source[view]
        while is_call_of_pieces(source):
            source = self.aliases.source[source]
        return self.same[source]

    def add_view(self, view: Node) -> None:
        """Add a view, or a tuple of views, at its place in the graph."""
        self.editor.discard([view])
        if is_call_of_pieces(view):
            self.pieces[view] = self.version
            return
        source = self.source(view)
        version = self.version
        key = same_view(view, source)
        if is_getitem(view):
            pieces: Any = view.args[0]
            version = self.pieces[pieces]
            inner = same_view(pieces, source)
            key = None if inner is None else (*inner, view.args[1])
        if key is not None:
            self.same[view] = self.views.setdefault(key, view)
        else:
            self.same[view] = view
        if self.same[view] is view:
            self.values[view] = (view, version)

    def value(self, alias: Node, before: Node) -> Node:
        """The present value of a view, taken again if the storage was written since."""
        alias = self.same[alias]
        value, version = self.values[alias]
        if version == self.version:
            return value
        source = self.value(self.source(alias), before)
        value = retaken(alias, source, self.editor, before=before)
        self.values[alias] = (value, self.version)
        return value

    def write(self, alias: Node, new: Node, before: Node) -> None:
        """Give a view a new value, and so its storage."""
        chain = [self.same[alias]]
        while chain[-1] is not self.root:
            chain.append(self.source(chain[-1]))
        wholes = [self.value(a, before) for a in chain[1:]]
        self.version += 1
        self.values[chain[0]] = (new, self.version)
        for view, whole, name in zip(chain, wholes, chain[1:], strict=False):
            new = write_through(view, whole, new, self.editor, before=before)
            self.values[name] = (new, self.version)


class _Walk:
    """One walk that rewrites every write of the storages it may."""

    def __init__(self, gm: GraphModule, editor: Editor) -> None:
        self.gm = gm
        self.editor = editor
        self.notes: list[Note] = []
        self.aliases = _Aliases(gm, editor)
        self.written: set[Node] = set()
        self.storages: dict[Node, _Storage] = {}
        self._choose()

    def _choose(self) -> None:
        refused: set[Node] = set()
        for node in self.gm.graph.nodes:
            for value in writes(node):
                root = self.aliases.root[value]
                self.written.add(root)
                reason = None
                if root.op != "call_function":
                    what = "an input" if root.op == "placeholder" else f'"{root.target}"'
                    reason = f"{node.name} writes {what}: kept"
                else:
                    reason = _why_not(node, value, self.aliases)
                if reason is not None:
                    refused.add(root)
                    self.notes.append(Note(node.name, reason, skipped=True))
        self.storages = {
            root: _Storage(root, self.aliases, self.editor) for root in self.written - refused
        }

    def storage_of(self, node: Node) -> _Storage | None:
        root = self.aliases.root.get(node)
        return None if root is None else self.storages.get(root)

    def run(self) -> None:
        """Rewrite the graph."""
        if not self.storages:
            return
        for node in list(self.gm.graph.nodes):
            if node.op in ("call_function", "call_module", "output"):
                self._visit(node)

    def _visit(self, node: Node) -> None:
        storage = self.storage_of(node)
        if storage is None or node is storage.root:
            self._refresh(node)
        elif is_in_place_result(node):
            self._write(node, storage)
        elif is_getitem(node):
            storage.add_view(node)
        else:
            self._refresh(node)
            storage.add_view(node)

    def _present(self, value: Node, before: Node) -> Node:
        storage = self.storage_of(value)
        if storage is None or is_call_of_pieces(value):
            return value
        return storage.value(value, before)

    def _refresh(self, node: Node) -> None:
        """Let a node read the present values."""
        args = map_arg(node.args, lambda n: self._present(n, node))
        kwargs = map_arg(node.kwargs, lambda n: self._present(n, node))
        if is_call(node, (aten.view.default,)) and args[0] is not node.args[0]:
            node.target = aten.reshape.default  # the present value may have another layout
        node.args, node.kwargs = args, kwargs

    def _write(self, node: Node, storage: _Storage) -> None:
        alias: Any = node.args[0]
        self._refresh(node)
        written: Any = node.args[0]
        storage.same[node] = storage.same[alias]
        self.editor.discard([node])
        if node.target is aten.detach_.default:
            return
        new = self._out_of_place(node)
        if new is not written:
            storage.write(alias, new, node)
        self.notes.append(Note(node.name, "made out-of-place"))
        self.editor.changed = True

    def _out_of_place(self, node: Node) -> Node:
        """The value that an in-place operator gives to what it writes."""
        target: Any = node.target
        value = node.meta["val"]
        if target is aten.copy_.default:
            source: Any = node.args[1]
            if source.meta["val"].shape == value.shape and dtype_of(source) == value.dtype:
                return self._kept(source, node)
        kwargs: dict[str, Any] = dict(node.kwargs)
        if len(node.all_input_nodes) == 1:
            kwargs["val"] = value  # nothing to promote to: what it would have written
        new = self.editor.call(out_of_place(target), *node.args, like=node, before=node, **kwargs)
        new.meta[WAS_IN_PLACE] = True
        if dtype_of(new) != value.dtype:  # in place, the written value's dtype wins
            new = self.editor.call(aten.to.dtype, new, value.dtype, like=node, before=node)
        return new

    def _kept(self, source: Node, node: Node) -> Node:
        """A value that later writes do not change: a copy, if it shares a written buffer."""
        root = self.aliases.root.get(source)
        if root is None or root not in self.written or root in self.storages:
            return source
        val = node.meta["val"]
        return self.editor.call(aten.clone.default, source, like=node, before=node, val=val)


def _check(gm: GraphModule) -> str | None:
    if not mutated_roots(gm.graph):
        return None
    left = [root.name for root in _Walk(gm, Editor(gm)).storages]
    return f"{', '.join(left[:3])} still written" if left else None


no_activation_writes = Invariant("no activation is written in place, but those declined", _check)


@graph_pass(needs=(HAS_VALUES,), gives=(no_activation_writes,))
def functionalize_activations(gm: GraphModule) -> PassResult:
    """Make in-place operators on activations out-of-place; writes of buffers and inputs stay.

    A write through a view becomes a new value of the whole, and every later reader of the
    storage, through whichever view, reads the new value.

    Before:  y = conv2d(x, w); s = select(y, 1, 0); add_(s, 1); return relu_(y)
    After:   y = conv2d(x, w); s = select(y, 1, 0); a = add(s, 1)
             z = select_scatter(y, a, 1, 0); return relu(z)
    """
    if not mutated_roots(gm.graph):
        return PassResult(changed=False)
    editor = Editor(gm)
    walk = _Walk(gm, editor)
    walk.run()
    return PassResult(changed=editor.finish(), notes=tuple(walk.notes))


@graph_pass(needs=(HAS_VALUES,), gives=(), ends=(no_activation_writes,))
def restore_in_place(gm: GraphModule) -> PassResult:
    """Undo `functionalize_activations` for operators whose input is a fresh result of no other use.

    Before:  y = relu(conv2d(x, w))         where the model has relu_
    After:   y = relu_(conv2d(x, w))
    """
    editor = Editor(gm)
    marked = [node for node in gm.graph.nodes if node.meta.get(WAS_IN_PLACE)]
    editor.changed = any([_restored(node) for node in marked])  # a list: all of them
    return PassResult(changed=editor.finish())


def _restored(node: Node) -> bool:
    """Give a node its in-place operator again; returns whether that is safe."""
    target = in_place(node.target)
    written = node.args[0] if node.args else None
    if target is None or not isinstance(written, Node) or written.op != "call_function":
        return False
    if len(written.users) > 1 or aliased_argument(written) is not None:
        return False
    before, after = written.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    if before.dtype != after.dtype or before.shape != after.shape:
        return False
    node.target = target
    return True


def in_place(target: object) -> Any:
    """The in-place form of an operator, None if it has none of the same overload.

    >>> in_place(aten.relu.default)
    <OpOverload(op='aten.relu_', overload='default')>
    """
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    packet = getattr(aten, f"{target._schema.name.rpartition('::')[2]}_", None)
    found = getattr(packet, target._overloadname, None)
    is_form = isinstance(found, OpOverload) and is_in_place(found)
    return found if is_form and out_of_place(found) is target else None
