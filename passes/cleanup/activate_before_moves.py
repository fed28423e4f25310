"""Compute activation functions at the operator that makes their input, before data movement."""

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import (
    ACTIVATIONS,
    ADD,
    CLAMP,
    CONV,
    CONV_TRANSPOSE,
    HARDTANH,
    IDENTITIES,
    LINEAR,
    MUL,
    PERMUTE,
    RELU,
    RELU6,
    RESHAPE,
    SLICE,
    SQUEEZE,
    UNSQUEEZE,
    Overloads,
    aten,
    is_call,
)
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_MOVES: Overloads = (
    *(*RESHAPE, *PERMUTE, *UNSQUEEZE, *SQUEEZE, *IDENTITIES),
    *(aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.channel_shuffle.default),
)
"""Operators that give each element of their input once."""
_CLIPS: Overloads = (*RELU, *RELU6, *HARDTANH, *CLAMP)
"""Functions that cost nothing where they are fused, also of places that a slice drops."""
_SOURCES: Overloads = (*CONV, *CONV_TRANSPOSE, *LINEAR, *ADD, *MUL)


@graph_pass(needs=(HAS_VALUES,), gives=())
def activate_before_moves(gm: GraphModule) -> PassResult:
    """Move an activation function in front of the data movement that it reads.

    The integers of an operator that a function follows need only the function's range: those of
    relu are twice as fine. Runtimes fuse the two where nothing stands between them.

    Before:  relu(pixel_shuffle(conv2d(x, w), 2))
    After:   pixel_shuffle(relu(conv2d(x, w)), 2)
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, ACTIVATIONS)]:
        moves = _moves_before(node)
        if not moves:
            continue
        last, first = moves[0], moves[-1]
        source = first.args[0]
        assert isinstance(source, Node)
        made = editor.call(
            node.target,
            source,
            *node.args[1:],
            like=node,
            after=source,
            **node.kwargs,
        )
        first.replace_input_with(source, made)
        editor.replace(node, last)
        notes.append(Note(node.name, f"computed at {source.name}, before {first.name}"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _moves_before(node: Node) -> list[Node]:
    """The data movement between an activation function and its source, the last one first.

    Empty if there is none, if another reader sees a value on the way, or if the source fuses no
    function.
    """
    moves: list[Node] = []
    passed = (*_MOVES, *SLICE) if is_call(node, _CLIPS) else _MOVES
    if len(node.all_input_nodes) > 1:  # a limit is computed, perhaps behind the source
        return moves
    while True:
        source = node.args[0]
        if not isinstance(source, Node) or len(source.users) > 1:
            return []
        if is_call(source, _SOURCES):
            return moves
        if not is_call(source, passed):
            return []
        moves.append(source)
        node = source
