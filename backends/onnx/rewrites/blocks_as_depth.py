"""Blocks of an image that become channels, and channels that become blocks."""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
import sympy

from pt2e_quant.backends.onnx.values import (
    Attribute,
    Dequantized,
    call,
    constant,
    make_constant,
    only_consumer,
    permutation,
    read_dequantize,
    read_quantize,
    redirect,
    remove_unread,
    sizes,
)

_Size = int | str | None

_BYTE = ir.DataType.UINT8
"""The integers that SpaceToDepth and DepthToSpace have kernels for."""
_IMAGE = "NChpwq"
"""The axes of an image in blocks of p rows and q columns."""
_MODES = {"NCpqhw": "CRD", "NpqChw": "DCR", "NhwpqC": "DCR", "NhwCpq": "CRD"}
"""What the axes may become or come from, with the mode of DepthToSpace: channels in front of a
block's pixels or behind, and places first or last."""
_KNOWN = 3
"""The sizes of four that a Reshape has to know."""
_FEW = 4
"""Rows of a block up to which its pixels are moved one by one; longer rows are copied whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A transpose of an image's six axes between two reshapes.

    Args:
        source: what the first reshape reads.
        stored: its qparams; None in float.
        last: the second reshape.
        order: the axes of `_IMAGE`, in their order where they are no image.
        is_to_image: whether they become the image.
        places: its sizes N, h and w.
        channels: C.
        side: p and q.
    """

    source: ir.Value
    stored: Dequantized | None
    last: ir.Node
    order: str
    is_to_image: bool
    places: tuple[_Size, _Size, _Size]
    channels: int
    side: int


def blocks_as_depth(graph: ir.Graph) -> int:
    """Write transposes of an image in blocks as SpaceToDepth or DepthToSpace.

    ONNX Runtime's Transpose is fast where one axis moves. These move two, and took 1.1 to 8.4
    times as long (`benchmarks/onnx_blocks.py`). Quantizes between them, on one set of qparams, go.

    Before:  Reshape(Transpose(Reshape(x, [N, C, h, r, w, r]), [0, 1, 3, 5, 2, 4]), [N, -1, h, w])
    After:   Gather(SpaceToDepth(x, r), places, 1)
    """
    changed = 0
    for node in [n for n in graph if n.op_type == "Transpose"]:
        turn = _turn(node)
        if turn is None or not _is_faster(turn):
            continue
        made = _to_image(graph, turn) if turn.is_to_image else _to_depth(graph, turn)
        result = turn.last.outputs[0]
        if turn.stored is not None:
            inputs = [made, *turn.stored.node.inputs[1:]]
            made = call(turn.last, "DequantizeLinear", inputs, name=f"{result.name}_real")
        made.type, made.shape = result.type, result.shape
        redirect(result, made)
        remove_unread(graph, [turn.last])
        changed += 1
    return changed


def _turn(node: ir.Node) -> _Turn | None:
    perm = permutation(node)
    first, last = _reshape_before(node.inputs[0]), _reshape_behind(node.outputs[0])
    if perm is None or len(perm) != len(_IMAGE) or first is None or last is None:
        return None
    source = first.inputs[0]
    parts = sizes(first.outputs[0])
    if source is None or len(parts) != len(_IMAGE):
        return None
    stored = read_dequantize(source)
    between = [read_dequantize(value) for value in (node.inputs[0], last.inputs[0])]
    if stored is not None and (stored.axis is not None or stored.quantized.dtype != _BYTE):
        stored = None
    rounds = any(one is not None and not (stored and one.same_qparams(stored)) for one in between)
    if rounds or (stored is None and source.dtype != ir.DataType.FLOAT):
        return None
    turned = [parts[at] for at in perm]
    is_to_image = _is_image(sizes(last.outputs[0]), turned)
    if not is_to_image and not _is_image(sizes(source), parts):
        return None
    batch, channels, height, side, width, _ = turned if is_to_image else parts
    assert isinstance(channels, int)
    assert isinstance(side, int)
    at = [perm.index(axis) for axis in range(len(perm))] if is_to_image else perm
    return _Turn(
        source=source,
        stored=stored,
        last=last,
        order="".join(_IMAGE[axis] for axis in at),
        is_to_image=is_to_image,
        places=(batch, height, width),
        channels=channels,
        side=side,
    )


def _reshape_before(value: ir.Value | None) -> ir.Node | None:
    """The Reshape in front of a value, or of the quantize and dequantize in front of it."""
    stored = read_dequantize(value)
    quantize = stored.quantized.producer() if stored is not None else None
    if quantize is not None and quantize.op_type == "QuantizeLinear":
        value = quantize.inputs[0]
    made = value.producer() if value is not None else None
    return made if made is not None and made.op_type == "Reshape" else None


def _reshape_behind(value: ir.Value) -> ir.Node | None:
    """The Reshape that alone reads a value, or its quantize and dequantize."""
    reader = only_consumer(value)
    if reader is not None and read_quantize(reader) is not None:
        reader = only_consumer(reader.outputs[0])
        if reader is not None and reader.op_type == "DequantizeLinear":
            reader = only_consumer(reader.outputs[0])
    return reader if reader is not None and reader.op_type == "Reshape" else None


def _is_image(image: list[_Size], parts: list[_Size]) -> bool:
    """True for [N, C, h p, w p] and [N, C, h, p, w, p] where C and p are known."""
    if len(image) != len(_IMAGE) - 2 or None in (*image, *parts[1:]):
        return False
    batch, channels, height, p, width, q = parts
    if not isinstance(channels, int) or not isinstance(p, int) or p != q:
        return False
    if channels != image[1] or batch not in (None, image[0]):  # the other sizes tell what it is
        return False
    sides = [sympy.sympify(size) * p for size in (height, width)]
    return sides == [sympy.sympify(size) for size in image[2:]]


def _is_faster(turn: _Turn) -> bool:
    if turn.order not in _MODES or (turn.order == "NhwCpq" and turn.side > _FEW):
        return False
    if turn.is_to_image:
        depth = _depth(turn)
        return depth == sizes(turn.source) or sum(isinstance(n, int) for n in depth) >= _KNOWN
    shape = constant(turn.last.inputs[1])
    return shape is None or 0 not in shape[1:]  # sizes of the transpose's result, which is gone


def _depth(turn: _Turn) -> list[_Size]:
    """The sizes of the tensor whose channels become blocks, first or last."""
    batch, height, width = turn.places
    depth = turn.channels * turn.side**2
    is_last = turn.order.startswith("Nhw")
    return [batch, height, width, depth] if is_last else [batch, depth, height, width]


def _data(turn: _Turn) -> ir.Value:
    """What is moved: integers where the source has them."""
    return turn.source if turn.stored is None else turn.stored.quantized


def _to_depth(graph: ir.Graph, turn: _Turn) -> ir.Value:
    """The pixels of each block as channels."""
    at, name = turn.last, turn.last.outputs[0].name
    options = {"blocksize": turn.side}
    x = call(at, "SpaceToDepth", [_data(turn)], options, name=f"{name}_depth")
    if _MODES[turn.order] == "CRD":
        places = np.arange(turn.side**2 * turn.channels).reshape(turn.side**2, turn.channels)
        index = make_constant(graph, f"{name}_places", places.T.reshape(-1).astype(np.int64))
        x = call(at, "Gather", [x, index], {"axis": 1}, name=f"{name}_sorted")
    if turn.order.startswith("Nhw"):
        x = call(at, "Transpose", [x], {"perm": [0, 2, 3, 1]}, name=f"{name}_last")
    return call(at, "Reshape", [x, at.inputs[1]], name=f"{name}_joined")


def _to_image(graph: ir.Graph, turn: _Turn) -> ir.Value:
    """The channels as the pixels of each block."""
    at, name = turn.last, turn.last.outputs[0].name
    x, depth = _data(turn), _depth(turn)
    if depth != sizes(turn.source):
        shape = [size if isinstance(size, int) else -1 for size in depth]
        held = make_constant(graph, f"{name}_depth", np.array(shape, np.int64))
        x = call(at, "Reshape", [x, held], name=f"{name}_blocks")
    if turn.order.startswith("Nhw"):
        x = call(at, "Transpose", [x], {"perm": [0, 3, 1, 2]}, name=f"{name}_channels")
    options: dict[str, Attribute] = {"blocksize": turn.side, "mode": _MODES[turn.order]}
    return call(at, "DepthToSpace", [x], options, name=f"{name}_image")
