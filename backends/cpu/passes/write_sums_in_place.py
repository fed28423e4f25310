"""Sums write into their summand, as oneDNN computes them, where nobody reads it afterwards."""

from torch.fx import Graph, GraphModule, Node

from pt2e_quant.graph.alias import roots
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.kernels.onednn.operators import (
    ConvSum,
    LinearSum,
    QConvSum,
    QLinear,
    QLinearSum,
    aten,
)

_SUMMAND, _HOW = 6, 13
"""Positions of the summand, and of a linear's "add" or "sum"."""


_CONTIGUOUS = (QLinear, QLinearSum, aten.layer_norm.default, aten.embedding.default)
"""Their results are contiguous whatever their inputs are; see `QLinearSum` for why that counts."""


class Storage:
    """Which values of a graph share storage, and when each storage is read for the last time."""

    def __init__(self, graph: Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self._roots = roots(graph)
        self._merged: dict[Node, Node] = {}
        self._last_read: dict[Node, int] = {}
        for node, at in self.order.items():
            for source in node.all_input_nodes:
                root = self._roots[source]
                self._last_read[root] = max(self._last_read.get(root, -1), at)

    def root(self, node: Node) -> Node:
        """The value whose storage a node's value may share."""
        root = self._roots[node]
        while root in self._merged:
            root = self._merged[root]
        return root

    def may_be_written(self, call: Node, summand: Node) -> bool:
        """Whether a call may write its summand: storage that an operator allocated, read last here.

        Views count as what they are views of.
        """
        root = self.root(summand)
        return (
            root.op == "call_function"
            and self._last_read[root] == self.order[call]
            and call.args.count(summand) == 1  # a convolution's own input may be its summand
            and all(self.root(n) is not root for n in call.all_input_nodes if n is not summand)
        )

    def share(self, call: Node, summand: Node) -> None:
        """Let a call's result have its summand's storage from here on."""
        old, new = self.root(call), self.root(summand)
        self._merged[old] = new
        self._last_read[new] = max(self._last_read[new], self._last_read.get(old, -1))


@graph_pass(needs=(HAS_VALUES,), gives=())
def write_sums_in_place(gm: GraphModule) -> PassResult:
    """Give sums their summand's storage for the result; copy a summand that is read later.

    Before:  onednn_conv_sum(x, …, y, …)
    After:   qconv2d_pointwise.binary(x, …, y, …), or the same on clone(y)
    """
    editor = Editor(gm)
    storage = Storage(gm.graph)
    notes = []
    for node in list(gm.graph.nodes):
        if node.target is ConvSum:
            notes.append(Note(node.name, _write_conv(editor, storage, node)))
        elif node.target is LinearSum:
            editor.changed = True
            notes.append(Note(node.name, _write_linear(editor, storage, node)))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _summand(node: Node) -> Node:
    found = node.args[_SUMMAND]
    assert isinstance(found, Node)
    return found


def _write_conv(editor: Editor, storage: Storage, node: Node) -> str:
    """OneDNN has no convolution with a sum that does not write."""
    summand = _summand(node)
    node.target = QConvSum
    editor.changed = True
    if storage.may_be_written(node, summand):
        storage.share(node, summand)
        return "in place"
    value = summand.meta["val"]
    copy = editor.call(aten.clone.default, summand, like=node, before=node, val=value)
    node.args = (*node.args[:_SUMMAND], copy, *node.args[_SUMMAND + 1 :])
    return "the summand is copied: it is read again"


def _write_linear(editor: Editor, storage: Storage, node: Node) -> str:
    summand = _summand(node)
    node.target = QLinearSum
    if summand.target not in _CONTIGUOUS:
        value = summand.meta["val"]
        ordered = editor.call(aten.contiguous.default, summand, like=node, before=node, val=value)
        node.args = (*node.args[:_SUMMAND], ordered, *node.args[_SUMMAND + 1 :])
        return "the summand is kept, and copied where it is not contiguous"
    found, made = summand.meta["val"], node.meta["val"]
    same_shape = [str(size) for size in found.shape] == [str(size) for size in made.shape]
    fits = found.dtype == made.dtype and same_shape
    if not fits or not storage.may_be_written(node, summand):
        return "the summand is kept: it is read again, or of another kind"
    node.args = (*node.args[:_HOW], "sum", *node.args[_HOW + 1 :])
    storage.share(node, summand)
    return "in place"
