"""Rotary embeddings on ONNX Runtime's own kernel."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    MICROSOFT,
    call,
    constant,
    int_attribute,
    make_constant,
    only_consumer,
    redirect,
    remove_unread,
    sizes,
)

__all__ = ["rotate_halves"]

_PER_ELEMENT = frozenset(("Cos", "Sin", "Cast", "Unsqueeze", "Identity"))


def rotate_halves(graph: ir.Graph) -> int:
    """Give the rotation of a vector's halves against each other to RotaryEmbedding.

    Only where cosines and sines are seen to be the same in both halves, and for all heads and
    sequences. The kernel may round a product and a sum once in place of twice.

    Before:  x * cos + Concat(-x[..., D / 2:], x[..., :D / 2]) * sin,   cos = Cos(Concat(a, a))
    After:   RotaryEmbedding(x, 0, cos[T, D / 2], sin[T, D / 2]),   x[B, H, T, D]
    """
    tables: dict[ir.Value, ir.Value] = {}
    changed = 0
    for node in [n for n in graph if n.op_type == "Concat"]:
        x = _swapped(node)
        turned = only_consumer(node.outputs[0])
        total = only_consumer(turned.outputs[0]) if turned is not None else None
        if x is None or turned is None or total is None:
            continue
        if turned.op_type != "Mul" or total.op_type != "Add":
            continue
        straight = _other(total, turned.outputs[0]).producer()
        if straight is None or straight.op_type != "Mul" or x not in straight.inputs:
            continue
        waves = _other(straight, x), _other(turned, node.outputs[0])
        if not all(_is_table(wave, x) for wave in waves):
            continue
        for wave in waves:
            if wave not in tables:
                tables[wave] = _half(graph, node, wave)
        start = make_constant(graph, "first_position", np.zeros(1, np.int64))
        output = total.outputs[0]
        inputs = [x, start, *(tables[wave] for wave in waves)]
        rotated = call(
            total,
            "RotaryEmbedding",
            inputs,
            name=f"{output.name}_rotated",
            like=output,
            domain=MICROSOFT,
        )
        redirect(output, rotated)
        remove_unread(graph, [total, straight])
        changed += 1
    return changed


def _swapped(node: ir.Node) -> ir.Value | None:
    """The x of Concat(-x[..., D / 2:], x[..., :D / 2]), in float32, which the kernel has."""
    if len(node.inputs) != 2 or int_attribute(node, "axis", -1) not in (-1, 3):
        return None
    minus, low = (value.producer() if value is not None else None for value in node.inputs)
    if minus is None or minus.op_type != "Neg" or low is None or minus.inputs[0] is None:
        return None
    high = minus.inputs[0].producer()
    x = low.inputs[0] if low.op_type == "Slice" else None
    width = sizes(x)[-1] if len(sizes(x)) == 4 else None
    if high is None or high.op_type != "Slice" or high.inputs[0] is not x or x is None:
        return None
    if not isinstance(width, int) or width % 2 or x.dtype is not ir.DataType.FLOAT:
        return None
    half = width // 2
    is_halved = _range(low, width) == (0, half) and _range(high, width) == (half, width)
    return x if is_halved else None


def _range(node: ir.Node, size: int) -> tuple[int, int] | None:
    """From where to where a Slice takes the last of four axes; None for other slices."""
    given = [constant(value) for value in node.inputs[1:]]
    if len(given) < 3 or any(v is None or v.size != 1 for v in given):
        return None
    start, end, axis, *step = (int(v.item()) for v in given if v is not None)
    if axis not in (-1, 3) or step not in ([], [1]):
        return None
    found = slice(start, end).indices(size)
    return found[0], found[1]


def _other(node: ir.Node, value: ir.Value) -> ir.Value:
    """The operand of a sum or product beside this one."""
    first, second = node.inputs
    found = second if first is value else first
    assert found is not None
    return found


def _is_table(wave: ir.Value, x: ir.Value) -> bool:
    """Whether a factor is [1, 1, T, D] for an x [B, H, T, D], and both its halves are the same."""
    shape, given = sizes(wave), sizes(x)
    if len(shape) != 4 or shape[:2] != [1, 1] or shape[2] is None or shape[2:] != given[2:]:
        return False
    value: ir.Value | None = wave
    while value is not None:
        node = value.producer()
        if node is None:
            return False
        if node.op_type == "Concat":
            is_last = int_attribute(node, "axis", 0) in (-1, len(sizes(node.outputs[0])) - 1)
            return is_last and len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
        value = _source(node)
    return False


def _source(node: ir.Node) -> ir.Value | None:
    """What a node works on element by element, keeping the last axis."""
    if node.op_type == "Unsqueeze":
        axes, rank = constant(node.inputs[1]), len(sizes(node.outputs[0]))
        is_before = axes is not None and rank and all(a % rank < rank - 1 for a in axes.tolist())
        return node.inputs[0] if is_before else None
    if node.op_type in _PER_ELEMENT:
        return node.inputs[0]
    if node.op_type == "Mul":
        factors = [constant(v) for v in node.inputs]
        scalars = [f for f in factors if f is not None and f.size == 1]
        if len(scalars) == 1:
            return node.inputs[0 if factors[1] is scalars[0] else 1]
    return None


def _half(graph: ir.Graph, node: ir.Node, wave: ir.Value) -> ir.Value:
    """The first half of each row: [T, D / 2]."""
    width = sizes(wave)[-1]
    assert isinstance(width, int)
    base = f"{wave.name}_half"
    flat = make_constant(graph, f"{base}_shape", np.array([-1, width], np.int64))
    ends = [np.array([v], np.int64) for v in (0, width // 2, 1)]
    rows = call(node, "Reshape", [wave, flat], name=f"{base}_rows")
    limits = [make_constant(graph, f"{base}_{i}", end) for i, end in enumerate(ends)]
    return call(node, "Slice", [rows, *limits], name=base)
