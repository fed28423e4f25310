"""Take relu and clip out of the way of the quantize that follows them."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    Dequantized,
    call,
    constant,
    make_constant,
    read_quantize,
)


def absorb_clips(graph: ir.Graph) -> int:
    """Let a quantize do a relu's or a clip's work, with a Clip on the integers if it must.

    ONNX Runtime fuses `Conv -> Relu -> QuantizeLinear` only when the quantized range ends at
    zero, and a clip only when the range lies inside it. Quantizing is monotone, so
    `q(clip(x, lo, hi)) == clip(q(x), q(lo), q(hi))` to the last bit, whatever the range.

    Before:  x -> Relu | Clip(lo, hi) -> QuantizeLinear
    After:   x -> QuantizeLinear [-> Clip(q(lo), q(hi)) if the integer range reaches further]
    """
    changed = 0
    for node in list(graph):
        limits = _clip_limits(node)
        value = node.outputs[0]
        if limits is None or value.is_graph_output():
            continue
        readers = [(use.node, read_quantize(use.node)) for use in value.uses()]
        if not readers or not all(_takes_over(q, limits) for _, q in readers):
            continue
        for reader, quantize in readers:
            assert quantize is not None
            reader.replace_input_with(0, node.inputs[0])
            _clip_integers(graph, reader, quantize, limits)
        graph.remove(node, safe=True)
        changed += 1
    return changed


def _takes_over(quantize: Dequantized | None, limits: tuple[float, float]) -> bool:
    if quantize is None or quantize.axis is not None:
        return False
    # ONNX has no Clip of 16-bit integers.
    return quantize.zero_point.dtype.itemsize == 1 or _integer_limits(quantize, limits) is None


def _integer_limits(quantize: Dequantized, limits: tuple[float, float]) -> tuple[int, int] | None:
    """The limits in integers; None where the type's own are as narrow."""
    low, high = (quantize.to_integer(limit) for limit in limits)
    return None if (low, high) == quantize.limits else (low, high)


def _clip_limits(node: ir.Node) -> tuple[float, float] | None:
    if node.op_type == "Relu":
        return 0.0, np.inf
    if node.op_type != "Clip":
        return None
    limits = [-np.inf, np.inf]
    for at, value in enumerate(node.inputs[1:]):
        array = constant(value)
        if array is not None and array.dtype == np.float32:
            limits[at] = float(array)
        elif value is not None:
            return None  # computed at run time, or a clip of integers
    return limits[0], limits[1]


def _clip_integers(
    graph: ir.Graph, reader: ir.Node, quantize: Dequantized, limits: tuple[float, float]
) -> None:
    integers = _integer_limits(quantize, limits)
    if integers is None:
        return
    low, high = integers
    dtype = quantize.zero_point.dtype
    value = reader.outputs[0]
    base = value.name or "quantized"
    clipped = call(
        reader,
        "Clip",
        [
            value,
            make_constant(graph, f"{base}_min", np.array(low, dtype)),
            make_constant(graph, f"{base}_max", np.array(high, dtype)),
        ],
        name=f"{base}_clipped",
        like=value,
        after=True,
    )
    clip = clipped.producer()
    for use in list(value.uses()):
        if use.node is not clip:
            use.node.replace_input_with(use.idx, clipped)
