"""Keep weights packed whose codes ONNX has no type for, in a form that the exporter keeps."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.core.formats.format_ops import DequantizeBlock
from pt2e_quant.core.qdq import DequantizePerChannel, DequantizePerGroup, is_dequantize
from pt2e_quant.core.unpack_op import is_unpack
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.held_constants import held_constant
from pt2e_quant.graph.meta import source_constant
from pt2e_quant.graph.ops import CONV, arguments, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.passes.weights.unpack_weights import unpack_nodes

_OWN_TYPE = (4, 8)
"""Widths that ONNX has integers of."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def keep_codes(gm: GraphModule) -> PassResult:
    """Unpack what ONNX has integers for; the rest stays packed, behind a dequantize of our own.

    A weight that integer activations are multiplied with is unpacked, whatever its width: its
    product is one of int8. A convolution's stays packed in 4 bits too: ONNX Runtime dequantizes
    the type of its own in every call there.

    Before:  linear(x, dequantize_per_channel(unpack(w, 3, …), scale[N], zero_point, 0, …))
    After:   linear(x, dequantize_block(unpack(w, 3, …), scale[N, 1], None, [1, -1], …))
    """
    editor = Editor(gm)
    kept: set[Node] = set()
    for node in [n for n in gm.graph.nodes if is_dequantize(n)]:
        packed = [n for n in node.all_input_nodes if is_unpack(n)]
        if not packed or packed[0] is not node.args[0]:
            continue
        if node.target not in (DequantizePerChannel, DequantizePerGroup):
            kept.update(packed)
        elif _has_no_type(packed[0], node) and not any(_integer_readers(node)):
            kept.update(packed)
            editor.replace(node, _as_block(gm, editor, node))
    changed = editor.finish()
    rest = [n for n in gm.graph.nodes if is_unpack(n) and n not in kept]
    result = unpack_nodes(gm, rest)
    return PassResult(changed or result.changed, result.notes)


def _has_no_type(packed: Node, dequantize: Node) -> bool:
    """True if ONNX has no integers of a weight's width, or no kernel that reads them there."""
    bits: Any = packed.args[1]
    return bits not in _OWN_TYPE or (bits == 4 and any(is_call(n, CONV) for n in dequantize.users))


def _integer_readers(dequantize: Node) -> Iterator[Node]:
    """Operators that read a weight and, beside it, an activation that was quantized."""
    for reader in dequantize.users:
        others = [n for n in reader.all_input_nodes if is_dequantize(n) and n is not dequantize]
        if any(source_constant(n.all_input_nodes[0]) is None for n in others):
            yield reader


def _as_block(gm: GraphModule, editor: Editor, node: Node) -> Node:
    named = arguments(node)
    codes: Node = named["input"]
    rank = codes.meta["val"].dim()
    scale: Node = named["scales"]
    zeros: Node | None = named["zero_points"]
    if node.target is DequantizePerGroup:
        block = [1, int(named["group_size"])]
        out = named["output_dtype"]
    else:
        axis = int(named["axis"]) % rank
        block = [1 if at == axis else WHOLE for at in range(rank)]
        out = named["out_dtype"]
        name = str(scale.target)
        scale = _column(gm, editor, scale, name, [-1 if at == axis else 1 for at in range(rank)])
        if zeros is not None:
            shape = list(scale.meta["val"].shape)
            zeros = _column(gm, editor, zeros, f"{name}_zero_point", shape)
    if zeros is not None and not _any(gm, zeros):
        zeros = None
    low, high = named["quant_min"], named["quant_max"]
    return editor.call(
        DequantizeBlock,
        codes,
        scale,
        zeros,
        block,
        low,
        high,
        named["dtype"],
        out_dtype=out,
        like=node,
        before=node,
        val=node.meta["val"],
    )


def _column(gm: GraphModule, editor: Editor, qparams: Node, name: str, shape: list[int]) -> Node:
    """Qparams of channels in the shape of their grid."""
    held = held_constant(gm, qparams)
    assert held is not None  # canonical form: a packed weight's qparams are constant
    if not held.is_floating_point() and held.amin() >= 0 and held.amax() <= 255:
        held = held.to(torch.uint8)
    return editor.constant(f"{name}_column", held.reshape(shape).clone(), like=qparams)


def _any(gm: GraphModule, node: Node) -> bool:
    held = held_constant(gm, node)
    return held is None or bool(held.any())


@graph_pass(needs=(HAS_VALUES,), gives=())
def powers_as_bytes(gm: GraphModule) -> PassResult:
    """Give scales in float8_e8m0fnu as their bytes: ONNX has the type from opset 24 on alone.

    Before:  dequantize_float(codes, scale: float8_e8m0fnu, …)
    After:   dequantize_float(codes, scale: uint8, …)
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if n.op == "get_attr"]:
        value: Any = held_constant(gm, node)
        if isinstance(value, Tensor) and value.dtype == torch.float8_e8m0fnu:
            name = f"{node.target}_exponents"
            editor.replace(node, editor.constant(name, value.view(torch.uint8), like=node))
            notes.append(Note(node.name, "its bytes"))
    return PassResult(editor.finish(), tuple(notes))
