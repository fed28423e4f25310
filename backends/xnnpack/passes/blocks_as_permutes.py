"""Blocks of pixels that a model gathers by strided slices, as the permute that they are."""

from collections.abc import Mapping
from itertools import permutations, product
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import CAT, SLICE, arguments, aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_MOST_PARTS = 64
"""More strided slices than that are no block of an image."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def blocks_as_permutes(gm: GraphModule) -> PassResult:
    """Write a cat of every s-th row and column, from every offset, as one permute of blocks.

    Swin's patches merge so, and the first layer of several YOLOs. ExecuTorch copies strided slices
    one element at a time, outside of its delegate (`benchmarks/strided_slices.py`).

    Before:  cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], 3)
    After:   reshape(permute(reshape(x, [N, H/2, 2, W/2, 2, C]), [0, 1, 3, 4, 2, 5]),
                     [N, H/2, W/2, 4 C])
    """
    editor, notes = Editor(gm), []
    for node in [n for n in gm.graph.nodes if is_call(n, CAT)]:
        found = _blocks(node)
        if found is None:
            continue
        x, steps = found
        view = _Blocks(x.meta["val"].shape, steps, arguments(node)["dim"])
        shapes = view.apart, [-1 if not isinstance(n, int) else n for n in node.meta["val"].shape]
        if any(shape.count(-1) > 1 for shape in shapes):
            notes.append(Note(node.name, "several sizes are dynamic", skipped=True))
            continue
        made = editor.call(aten.reshape.default, x, shapes[0], like=node)
        made = editor.call(aten.permute.default, made, view.order, like=node)
        val = node.meta["val"]
        made = editor.call(aten.reshape.default, made, shapes[1], like=node, val=val)
        editor.replace(node, made)
        notes.append(Note(node.name, "is a permute of blocks"))
    return PassResult(editor.finish(), tuple(notes))


class _Blocks:
    """A tensor whose strided dimensions are apart from the places in a block."""

    def __init__(self, shape: Any, steps: Mapping[int, int], dim: int) -> None:
        self.apart: list[int] = []
        outer, inner = [], {}
        for d, size in enumerate(shape):
            outer.append(len(self.apart))
            step = steps.get(d, 1)
            self.apart.append(size // step if isinstance(size, int) else -1)
            if step > 1:
                inner[d] = len(self.apart)
                self.apart.append(step)
        joined = dim % len(shape)
        self.order = [*outer[:joined], *(inner[d] for d in steps), *outer[joined:]]


def _blocks(cat: Node) -> tuple[Node, dict[int, int]] | None:
    """The tensor whose blocks a cat joins, and their sizes by dimension, the slowest one first."""
    given = arguments(cat)
    if len(given["tensors"]) > _MOST_PARTS:
        return None
    found = [_strided(n) for n in given["tensors"]]
    parts = [part for part in found if part is not None]
    if not parts or len(parts) < len(found):
        return None
    (x, first), *_ = parts
    steps = {dim: step for dim, (_, step) in first.items()}
    same = all(p[0] is x and {d: s for d, (_, s) in p[1].items()} == steps for p in parts)
    shape = x.meta["val"].shape
    whole = all(statically_known_true(shape[d] % step == 0) for d, step in steps.items())
    if not same or not whole or given["dim"] % len(shape) in steps:
        return None
    for order in permutations(steps):
        offsets = [tuple(part[1][d][0] for d in order) for part in parts]
        if offsets == list(product(*(range(steps[d]) for d in order))):
            return x, {d: steps[d] for d in order}
    return None


def _strided(node: Any) -> tuple[Node, dict[int, tuple[int, int]]] | None:
    """What strided slices are taken of, and by dimension where they start and their step."""
    found: dict[int, tuple[int, int]] = {}
    while is_call(node, SLICE):
        given, x = arguments(node), node.args[0]
        before, behind = x.meta["val"].shape, node.meta["val"].shape
        dim, start, step = given["dim"] % len(before), given["start"] or 0, given["step"]
        if not isinstance(start, int) or start < 0 or (step == 1 and start) or dim in found:
            break
        count = (before[dim] - start + step - 1) // step
        if not statically_known_true(behind[dim] == count):
            break
        if step > 1:
            found[dim] = start, step
        node = x
    return (node, found) if found else None
