"""Write the remaining q/dq out in ATen operators."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.integer_ops.calls import Call, cast
from pt2e_quant.core.integer_ops.profiles import Quantization
from pt2e_quant.core.integer_ops.quantize import WRITTEN_KINDS, dequantize, quantize
from pt2e_quant.core.qdq import QdqKind, is_quantize, kind_of_qdq, read_qparams
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import aten
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult
from pt2e_quant.passes.reference.read_sites import emitter, literal


def decompose_qdq(by: Quantization = Quantization.INVERSE) -> GraphPass:
    """The pass that writes each quantize and dequantize as arithmetic.

    Before:  q = quantize_per_tensor(x, 0.1, 3, -128, 127, int8)
    After:   q = clamp(round(x * 10.0) + 3, -128, 127).to(int8)

    Equal to the operators to the last bit, unless the target divides by the scale.
    """

    def edit(gm: GraphModule) -> PassResult:
        editor = Editor(gm)
        notes = []
        for node in list(gm.graph.nodes):
            if kind_of_qdq(node) not in WRITTEN_KINDS:
                continue
            call = emitter(editor, node)
            if is_quantize(node):
                made = _quantize(editor, call, node, by)
            else:
                made = _dequantize(editor, call, node)
            editor.replace(node, made)
            notes.append(Note(node.name, "written out"))
        return PassResult(editor.finish(), tuple(notes))

    return GraphPass("decompose_qdq", edit, needs=(HAS_VALUES,), gives=())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Qparams:
    """What a q/dq scales and moves by: numbers, or nodes that broadcast against its tensor.

    The scale is inverted for who multiplies by its inverse.
    """

    scale: Any
    zero_point: Any
    limits: tuple[int, int]


def _quantize(editor: Editor, call: Call[Node], node: Node, by: Quantization) -> Node:
    args: Any = node.args
    x: Node = args[0]
    if x.meta["val"].dtype is not torch.float32:
        x = cast(call, x, torch.float32)
    qp = _qparams(editor, call, node, by)
    storage = node.meta["val"].dtype
    made: Node = quantize(
        call, x, qp.scale, qp.zero_point, limits=qp.limits, storage=storage, by=by
    )
    return made


def _dequantize(editor: Editor, call: Call[Node], node: Node) -> Node:
    args: Any = node.args
    qp = _qparams(editor, call, node, Quantization.DIVIDED)
    made: Node = dequantize(call, args[0], qp.scale, qp.zero_point, dtype=node.meta["val"].dtype)
    return made


def _qparams(editor: Editor, call: Call[Node], node: Node, by: Quantization) -> _Qparams:
    args: Any = node.args
    inverts = by is Quantization.INVERSE
    if kind_of_qdq(node) is QdqKind.PER_TENSOR:
        scale = float(args[1])
        return _Qparams(
            scale=1.0 / scale if inverts else scale, zero_point=args[2], limits=args[3:5]
        )
    if kind_of_qdq(node) is QdqKind.PER_TENSOR_DYNAMIC:
        given = args[1]
        if inverts:
            # The operator takes 1 / scale in double precision, rounds it to float32 to multiply.
            given = call(aten.reciprocal.default, cast(call, given, torch.float64))
        real = cast(call, given, torch.float32)
        return _Qparams(scale=real, zero_point=args[2], limits=args[3:5])
    if args[1].op == "get_attr":
        return _constant_qparams(editor, node, inverts)
    # In the body of a branch the scales are inputs.
    shape = _broadcast(node, args[3], -1)
    reshaped = call(aten.reshape.default, args[1], shape)
    return _Qparams(
        scale=call(aten.reciprocal.default, reshaped) if inverts else reshaped,
        zero_point=call(aten.reshape.default, args[2], shape),
        limits=args[4:6],
    )


def _constant_qparams(editor: Editor, node: Node, inverts: bool) -> _Qparams:
    qp = read_qparams(editor.gm, node)
    shape = _broadcast(node, qp.axis, qp.scale.numel())

    def held(values: Tensor, what: str) -> Any:
        return literal(editor, values.reshape(shape), f"{node.name}_{what}", node)

    scale, what = (1.0 / qp.scale, "inverse_scale") if inverts else (qp.scale, "scale")
    return _Qparams(
        scale=held(scale, what),
        zero_point=held(qp.zero_point, "zero_point") if bool((qp.zero_point != 0).any()) else 0,
        limits=(qp.quant_min, qp.quant_max),
    )


def _broadcast(node: Node, axis: int | None, count: int) -> list[int]:
    assert axis is not None
    shape = [1] * node.meta["val"].dim()
    shape[axis] = count
    return shape
