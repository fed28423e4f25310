"""Multiply by a quantized cache's integers, and apply its scales to what is smaller."""

import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    call,
    constant,
    only_consumer,
    permutation,
    redirect,
    remove_unread,
    sizes,
)


def scale_products(graph: ir.Graph) -> int:
    """Take the scales of rows out of a product's right side: keys and values kept in few bits.

    Scaling all of a cache for each token reads and writes all of it once more; scores have a
    row for each new token alone. The same numbers in another order: a product differs by
    float rounding.

    Before:  q @ Transpose(Cast(codes) * scales)
    After:   (q @ Transpose(Cast(codes))) * Transpose(scales),   codes[…, S, D], scales[…, S, 1]

    Before:  p @ (Cast(codes) * scales)
    After:   (p * Transpose(scales)) @ Cast(codes)
    """
    turned: dict[ir.Value, ir.Value] = {}
    changed = 0
    for product in [n for n in graph if n.op_type == "MatMul"]:
        left, right = product.inputs
        if left is None or right is None or len(sizes(left)) == 1:
            continue
        turn = right.producer()
        is_turned = turn is not None and _swaps_last(turn)
        scaled = turn.inputs[0] if turn is not None and is_turned else right
        found = _read_rows(scaled)
        if found is None or only_consumer(right) is None:
            continue
        steps, scales = found
        if scales not in turned:
            turned[scales] = _transpose(product, scales, f"{scales.name}_turned")
        _scale(product, left, steps, turned[scales], is_turned=is_turned)
        remove_unread(graph, [product])
        changed += 1
    return changed


def _scale(
    product: ir.Node, left: ir.Value, steps: ir.Value, scales: ir.Value, *, is_turned: bool
) -> None:
    """The product without scales, which come behind it, or in front where its rows are summed."""
    output = product.outputs[0]
    name = output.name
    if is_turned:
        right = _transpose(product, steps, f"{name}_codes")
        made = call(product, "MatMul", [left, right], name=f"{name}_steps", like=output)
        made = call(product, "Mul", [made, scales], name=f"{name}_scaled", like=output)
    else:
        weighted = call(product, "Mul", [left, scales], name=f"{name}_weights")
        made = call(product, "MatMul", [weighted, steps], name=f"{name}_sums", like=output)
    redirect(output, made)


def _read_rows(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """Integers as float [..., S, D] and the scales of their rows [..., S, 1], of a product."""
    node = value.producer() if value is not None else None
    if node is None or value is None or node.op_type != "Mul" or only_consumer(value) is None:
        return None
    steps, scales = node.inputs
    if steps is None or scales is None or constant(scales) is not None:
        return None
    rows, columns = sizes(steps), sizes(scales)
    if len(rows) < 2 or columns != [*rows[:-1], 1] or rows[-1] == 1 or None in rows:
        return None
    return (steps, scales) if _is_read(steps) else None


def _is_read(steps: ir.Value) -> bool:
    """Whether a value is integers cast to float, or halves of rows that were packed in bytes."""
    joined = steps.producer()
    if joined is None or joined.op_type != "Concat":
        return _is_cast(joined)
    sources = [v.producer() for v in joined.inputs if v is not None]
    return [n.op_type for n in sources if n is not None] == ["Sub", "Floor"]


def _is_cast(node: ir.Node | None) -> bool:
    """Whether it casts int8 to float."""
    if node is None or node.op_type != "Cast" or node.inputs[0] is None:
        return False
    to = node.attributes["to"].as_int()
    return node.inputs[0].dtype is ir.DataType.INT8 and to == ir.DataType.FLOAT


def _swaps_last(node: ir.Node) -> bool:
    """Whether a Transpose swaps the last two axes and no others."""
    perm = permutation(node)
    if perm is None:
        return False
    last = len(perm) - 1
    return perm == [*range(last - 1), last, last - 1]


def _transpose(product: ir.Node, value: ir.Value, name: str) -> ir.Value:
    last = len(sizes(value)) - 1
    perm = [*range(last - 1), last, last - 1]
    made = call(product, "Transpose", [value], {"perm": perm}, name=name)
    made.type = value.type
    made.shape = ir.Shape([value.shape[axis] for axis in perm]) if value.shape is not None else None
    return made
