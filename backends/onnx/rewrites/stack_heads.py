"""Attention whose query heads share key heads, without copying the keys for each of them."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    call,
    constant,
    int_attribute,
    make_constant,
    only_consumer,
    permutation,
    redirect,
    remove_unread,
    sizes,
)

__all__ = ["stack_heads"]

_ELEMENTWISE = frozenset(("Add", "Sub", "Mul", "Div", "Where", "Max", "Min", "Tanh"))
"""Operators between the first product and softmax that may see the rows of heads stacked."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """A matrix for each shared head, and how many heads read each."""

    source: ir.Value
    heads: int
    repeats: int


@dataclass(frozen=True, slots=True)
class _Attention:
    """`softmax(f(query @ keys)) @ values`; f by `between`, last operator first."""

    query: ir.Value
    keys: _Shared
    is_turned: bool
    first: ir.Node
    between: tuple[ir.Node, ...]
    softmax: ir.Node
    values: _Shared
    last: ir.Node


def stack_heads(graph: ir.Graph) -> int:
    """Multiply all the heads that share keys and values as the rows of one product.

    Repeating keys and values copies the whole cache for each token. Sums are the same, in another
    order at most.

    Before:  softmax(q @ Transpose(repeat(k)) + mask) @ repeat(v)
    After:   softmax(q[B, H, G * T, D] @ Transpose(k) + mask G times) @ v

    with q[B, H * G, T, D], k and v[B, H, S, D]; the result is as before, [B, H * G, T, D].
    """
    masks: dict[tuple[ir.Value, int], ir.Value] = {}
    changed = 0
    for node in [n for n in graph if n.op_type == "Softmax"]:
        found = _read_attention(node)
        if found is None:
            continue
        _stack(graph, found, masks)
        changed += 1
    return changed


def _read_attention(softmax: ir.Node) -> _Attention | None:
    last = only_consumer(softmax.outputs[0])
    if last is None or last.op_type != "MatMul" or last.inputs[0] is not softmax.outputs[0]:
        return None
    values = _read_shared(last.inputs[1])
    if values is None or int_attribute(softmax, "axis", -1) not in (-1, 3):
        return None
    between: list[ir.Node] = []
    scores = softmax.inputs[0]
    if None in sizes(scores):
        return None
    while scores is not None and only_consumer(scores) is not None:
        node = scores.producer()
        if node is None or node.op_type not in _ELEMENTWISE:
            break
        whole = [v for v in node.inputs if v is not None and sizes(v) == sizes(scores)]
        if len(whole) != 1:
            return None
        between.append(node)
        scores = whole[0]
    first = scores.producer() if scores is not None else None
    if scores is None or only_consumer(scores) is None or first is None:
        return None
    if first.op_type != "MatMul":
        return None
    query, right = first.inputs
    turn = right.producer() if right is not None else None
    is_turned = turn is not None and permutation(turn) == [0, 1, 3, 2]
    keys = _read_shared(turn.inputs[0] if turn is not None and is_turned else right)
    if query is None or keys is None:
        return None
    found = _Attention(query, keys, is_turned, first, tuple(between), softmax, values, last)
    return found if _fits(found) else None


def _fits(found: _Attention) -> bool:
    """Whether both products stack alike, and all that lies between them too."""
    keys, values = found.keys, found.values
    rows = sizes(found.query)
    if (keys.heads, keys.repeats) != (values.heads, values.repeats) or len(rows) != 4:
        return False
    if rows[1] != keys.heads * keys.repeats or not isinstance(rows[3], int):
        return False
    if rows[0] is None or rows[0] != sizes(keys.source)[0] or rows[0] != sizes(values.source)[0]:
        return False
    beside = [v for node in found.between for v in node.inputs if not _is_data(v, node)]
    return all(_is_for_all_heads(v, rows[2]) for v in beside)


def _is_data(value: ir.Value | None, node: ir.Node) -> bool:
    return value is not None and sizes(value) == sizes(node.outputs[0])


def _is_for_all_heads(value: ir.Value | None, rows: int | str | None) -> bool:
    """Whether a value is the same for each head: [.., 1, T or 1, S]."""
    found = [1, 1, *sizes(value)]
    is_known = value is not None and value.shape is not None and rows is not None
    return is_known and (len(found) < 5 or found[-3] == 1) and found[-2] in (1, rows)


def _read_shared(value: ir.Value | None) -> _Shared | None:
    """The matrices behind `repeat_kv`: Unsqueeze, Expand, Reshape."""
    chain = _chain(value, ("Reshape", "Expand", "Unsqueeze"))
    if chain is None:
        return None
    axes = constant(chain[2].inputs[1])
    source = chain[2].inputs[0]
    found = sizes(source)
    if source is None or axes is None or axes.tolist() not in ([2], [-3]) or len(found) != 4:
        return None
    wide = sizes(chain[1].outputs[0])
    if len(wide) != 5 or None in found:
        return None
    heads, repeats = found[1], wide[2]
    if not isinstance(heads, int) or not isinstance(repeats, int) or repeats < 2:
        return None
    if [*wide[:2], *wide[3:]] != found or sizes(value) != [found[0], heads * repeats, *found[2:]]:
        return None
    return _Shared(source, heads, repeats)


def _chain(value: ir.Value | None, op_types: tuple[str, ...]) -> list[ir.Node] | None:
    """The operators of these types that made a value, the last first."""
    found = []
    for op_type in op_types:
        node = value.producer() if value is not None else None
        if node is None or node.op_type != op_type:
            return None
        found.append(node)
        value = node.inputs[0]
    return found


def _stack(graph: ir.Graph, found: _Attention, masks: dict[tuple[ir.Value, int], ir.Value]) -> None:
    heads, repeats = found.keys.heads, found.keys.repeats
    output, base = found.last.outputs[0], found.last.outputs[0].name
    rows, back = sizes(found.query), sizes(output)
    at = found.first
    shape = make_constant(graph, f"{base}_stacked", np.array([0, heads, -1, rows[3]], np.int64))
    query = call(at, "Reshape", [found.query, shape], name=f"{base}_query")
    right = found.keys.source
    if found.is_turned:
        right = call(at, "Transpose", [right], {"perm": [0, 1, 3, 2]}, name=f"{base}_keys")
    scores = call(at, "MatMul", [query, right], name=f"{base}_scores")
    for node in reversed(found.between):
        inputs = [
            scores if _is_data(v, node) else _for_rows(v, node, repeats, masks) for v in node.inputs
        ]
        scores = call(node, node.op_type, inputs, name=f"{node.outputs[0].name}_stacked")
    chances = call(found.softmax, "Softmax", [scores], {"axis": -1}, name=f"{base}_chances")
    product = call(found.last, "MatMul", [chances, found.values.source], name=f"{base}_product")
    apart = make_constant(
        graph, f"{base}_apart", np.array([0, heads * repeats, -1, back[3]], np.int64)
    )
    redirect(output, call(found.last, "Reshape", [product, apart], name=f"{base}_all", like=output))
    remove_unread(graph, [found.last])


def _for_rows(
    value: ir.Value | None,
    node: ir.Node,
    repeats: int,
    masks: dict[tuple[ir.Value, int], ir.Value],
) -> ir.Value | None:
    """What all heads read, for the rows of several: repeated once for all layers."""
    found = sizes(value)
    if value is None or len(found) < 2 or found[-2] == 1:
        return value
    if (value, repeats) not in masks:
        masks[value, repeats] = call(
            node,
            "Concat",
            [value] * repeats,
            {"axis": len(found) - 2},
            name=f"{value.name}_{repeats}_times",
        )
    return masks[value, repeats]
