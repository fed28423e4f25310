"""Write norms of a root mean square in the form that ONNX Runtime fuses."""

import onnx_ir as ir

from pt2e_quant.backends.onnx.values import call, constant, only_consumer, redirect, remove_unread

__all__ = ["divide_by_root"]


def divide_by_root(graph: ir.Graph) -> int:
    """Divide by a root in place of multiplying by its reciprocal, where a norm does so.

    ONNX Runtime makes one SimplifiedLayerNormalization of Pow, ReduceMean, Add, Sqrt, Div and
    Mul, but not of `rsqrt` as it is exported. One rounding where there were two: a value moves by
    one and a half units in its last place at most.

    Before:  x * Reciprocal(Sqrt(ReduceMean(Pow(x, 2)) + eps))
    After:   x / Sqrt(ReduceMean(Pow(x, 2)) + eps)
    """
    changed = 0
    for node in [n for n in graph if n.op_type == "Reciprocal"]:
        root = node.inputs[0]
        product = only_consumer(node.outputs[0])
        x = _normed(root)
        if root is None or x is None or product is None or product.op_type != "Mul":
            continue
        if x not in product.inputs:
            continue
        output = product.outputs[0]
        redirect(output, call(product, "Div", [x, root], name=f"{output.name}_div", like=output))
        remove_unread(graph, [product])
        changed += 1
    return changed


def _normed(root: ir.Value | None) -> ir.Value | None:
    """The x of Sqrt(ReduceMean(Pow(x, 2)) + eps)."""
    total = _step(_step(root, "Sqrt", 0), "Add", None)
    if total is None:
        return None
    square = _step(total, "ReduceMean", 0)
    power = square.producer() if square is not None else None
    if power is None or power.op_type != "Pow":
        return None
    exponent = constant(power.inputs[1])
    return power.inputs[0] if exponent is not None and exponent.tolist() in (2, [2]) else None


def _step(value: ir.Value | None, op_type: str, at: int | None) -> ir.Value | None:
    """An input of the operator that made a value; None where it is another operator.

    Without a place, the input beside a constant.
    """
    node = value.producer() if value is not None else None
    if node is None or node.op_type != op_type:
        return None
    if at is not None:
        return node.inputs[at]
    found = [v for v in node.inputs if constant(v) is None]
    return found[0] if len(found) == 1 else None
