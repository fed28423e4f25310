"""Masks in as few operators as ONNX has for them."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    Array,
    call,
    constant,
    make_constant,
    redirect,
    remove_unread,
)

__all__ = ["any_of_floats", "choose_by_mask"]


def choose_by_mask(graph: ir.Graph) -> int:
    """Write an additive mask as a choice of two numbers; exact.

    Before:  (Cast(mask) - 1) * big
    After:   Where(mask, 0, -big)
    """
    changed = 0
    for node in [n for n in graph if n.op_type == "Mul"]:
        for at in (0, 1):
            shifted, big = _producer(node, at), constant(node.inputs[1 - at])
            cast = _producer(shifted, 0) if shifted is not None else None
            if shifted is None or cast is None or big is None or big.size != 1:
                continue
            if shifted.op_type != "Sub" or not _is_one(shifted.inputs[1]) or not _is_mask(cast):
                continue
            output = node.outputs[0]
            low = make_constant(graph, f"{output.name}_low", np.array(-big.reshape(()), big.dtype))
            none = make_constant(graph, f"{output.name}_none", np.zeros((), big.dtype))
            inputs = [cast.inputs[0], none, low]
            redirect(output, call(node, "Where", inputs, name=f"{output.name}_where", like=output))
            remove_unread(graph, [node])
            changed += 1
            break
    return changed


def any_of_floats(graph: ir.Graph) -> int:
    """Take the greatest of zeros and ones in the type that is wanted; exact.

    Before:  Cast(Cast(ReduceMax(Cast(mask, int64)), bool), float)
    After:   ReduceMax(Cast(mask, float))
    """
    changed = 0
    for node in [n for n in graph if n.op_type == "Cast" and _to(n) is ir.DataType.FLOAT]:
        seen = _producer(node, 0)
        most = _producer(seen, 0) if seen is not None else None
        cast = _producer(most, 0) if most is not None else None
        if seen is None or most is None or cast is None or seen.op_type != "Cast":
            continue
        if _to(seen) is not ir.DataType.BOOL or most.op_type != "ReduceMax" or not _is_mask(cast):
            continue
        output = node.outputs[0]
        to = {"to": int(ir.DataType.FLOAT)}
        real = call(node, "Cast", [cast.inputs[0]], to, name=f"{output.name}_mask")
        keep = {"keepdims": 1, "noop_with_empty_axes": 0}
        keep |= {k: most.attributes[k].as_int() for k in keep if k in most.attributes}
        inputs = [real, *most.inputs[1:]]
        redirect(
            output, call(node, "ReduceMax", inputs, keep, name=f"{output.name}_any", like=output)
        )
        remove_unread(graph, [node])
        changed += 1
    return changed


def _producer(node: ir.Node, at: int) -> ir.Node | None:
    value = node.inputs[at] if at < len(node.inputs) else None
    return value.producer() if value is not None else None


def _is_one(value: ir.Value | None) -> bool:
    one: Array | None = constant(value)
    return one is not None and one.size == 1 and bool(one.item() == 1)


def _is_mask(node: ir.Node) -> bool:
    """Whether a node casts booleans to numbers."""
    source = node.inputs[0]
    return node.op_type == "Cast" and source is not None and source.dtype is ir.DataType.BOOL


def _to(node: ir.Node) -> ir.DataType:
    return ir.DataType(node.attributes["to"].as_int())
