"""Rules of the integer reference: add, pools, averages, and what only moves or clamps integers."""

import math

from torch.fx import Node

from pt2e_quant.core.integer_ops.calls import Call, widen
from pt2e_quant.core.integer_ops.requantize import OutputRange, requantize
from pt2e_quant.core.integer_ops.sums import add, add_up, common_shift
from pt2e_quant.core.qdq import QdqKind, kind_of_qdq
from pt2e_quant.core.qparams import QParams
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import (
    ADAPTIVE_AVG_POOL2D,
    ADD,
    CAT,
    MAX_POOL2D,
    MEAN,
    PERMUTE,
    RESHAPE,
    SELECT,
    SLICE,
    SQUEEZE,
    UNSQUEEZE,
    argument,
    aten,
    is_call,
)
from pt2e_quant.graph.pattern import Many, Match, Op, chain, one_of
from pt2e_quant.graph.rewrite import Rule, Skip
from pt2e_quant.passes.reference.integer_operands import (
    ACTIVATION,
    QUANTIZE,
    Operand,
    dequantized,
    emitter,
    output_of,
)

__all__ = ["SUM_RULES"]

_INT32 = (1 << 31) - 1
_MOVES = one_of(RESHAPE, PERMUTE, UNSQUEEZE, SQUEEZE, SLICE, SELECT)


def _is_same(a: QParams, b: QParams) -> bool:
    return (
        a.scale_float == b.scale_float
        and a.zero_point_int == b.zero_point_int
        and (a.quant_min, a.quant_max, a.dtype) == (b.quant_min, b.quant_max, b.dtype)
    )


def _rescaled(
    call: Call[Node], x: Operand, integers: Node, output: tuple[QParams, OutputRange]
) -> Node | Skip:
    """Integers of x's scale in the output's; untouched where both are the same."""
    qparams, out = output
    if not out.is_exact:
        return Skip("the output's integers are wider than float32 holds")
    if _is_same(x.qparams, qparams):
        is_narrowed = (out.low, out.high) != (qparams.quant_min, qparams.quant_max)
        return call(aten.clamp.default, integers, out.low, out.high) if is_narrowed else integers
    factor = float((x.qparams.scale / qparams.scale).item())
    wide = widen(call, integers, x.qparams.zero_point_int, x.storage)
    return requantize(call, wide, factor, out)


def _add(m: Match, editor: Editor) -> Node | Skip:
    x, y = (Operand.of(editor.gm, m.nodes[name]) for name in ("dq_x", "dq_y"))
    op = m.nodes["op"]
    if argument(op, "alpha") != 1:
        return Skip("add scales its second summand")
    if max(x.storage.itemsize, y.storage.itemsize) > 2:
        return Skip("summands are wider than 16 bits")
    qparams, out = output_of(editor, m)
    scale = qparams.scale_float
    factors = common_shift(x.qparams.scale_float / scale, y.qparams.scale_float / scale)
    if factors is None:
        return Skip("the summands' scales are far above the output's")
    return add(
        emitter(editor, op),
        x.node,
        y.node,
        factors,
        out,
        zero_points=(x.qparams.zero_point_int, y.qparams.zero_point_int),
        storages=(x.storage, y.storage),
    )


def _max_pool(m: Match, editor: Editor) -> Node | Skip:
    x, op = Operand.of(editor.gm, m.nodes["dq_x"]), m.nodes["op"]
    call = emitter(editor, op)
    # Padding is the least integer, as -inf is the least real number.
    pooled = call(aten.max_pool2d.default, x.node, *op.args[1:], **op.kwargs)
    return _rescaled(call, x, pooled, output_of(editor, m))


def _average(m: Match, editor: Editor) -> Node | Skip:
    x, op = Operand.of(editor.gm, m.nodes["dq_x"]), m.nodes["op"]
    value = x.node.meta["val"]
    if is_call(op, ADAPTIVE_AVG_POOL2D):
        if list(argument(op, "output_size")) != [1, 1]:
            return Skip("averages over windows")
        dims, keepdim = [-2, -1], True
    else:
        dims, keepdim = argument(op, "dim"), bool(argument(op, "keepdim"))
        if argument(op, "dtype") is not None or not dims:
            return Skip("mean over no named dimension, or in another dtype")
    sizes = [value.shape[d] for d in dims]
    if not all(isinstance(size, int) for size in sizes):
        return Skip("averages over a dynamic dimension")
    count = math.prod(sizes)
    if count * x.reach > _INT32:
        return Skip("the sum may not fit in int32")
    qparams, out = output_of(editor, m)
    if not out.is_exact:
        return Skip("the output's integers are wider than float32 holds")
    call = emitter(editor, op)
    zero = x.qparams.zero_point_int
    total = add_up(call, x.node, dims, keepdim=keepdim, zero_point=zero, storage=x.storage)
    factor = float((x.qparams.scale / (qparams.scale * count)).item())
    return requantize(call, total, factor, out)


def _move(m: Match, editor: Editor) -> Node | Skip:
    x, op = Operand.of(editor.gm, m.nodes["dq_x"]), m.nodes["op"]
    call = emitter(editor, op)
    return _rescaled(
        call, x, call(op.target, x.node, *op.args[1:], **op.kwargs), output_of(editor, m)
    )


def _clamp(m: Match, editor: Editor) -> Node | Skip:
    """A relu alone, or a requantize: nothing but a clamp between dequantize and quantize."""
    x = Operand.of(editor.gm, m.nodes["dq_x"])
    call = emitter(editor, m.nodes.get("act", m.anchor))
    return _rescaled(call, x, x.node, output_of(editor, m))


def _cat(m: Match, editor: Editor) -> Node | Skip:
    op, items = m.nodes["op"], m["xs"]
    if not all(kind_of_qdq(item) is QdqKind.PER_TENSOR for item in items):
        return Skip("not every input is integers")
    output = output_of(editor, m)
    call = emitter(editor, op)
    parts = []
    for item in items:
        x = Operand.of(editor.gm, item)
        part = _rescaled(call, x, x.node, output)
        if isinstance(part, Skip):
            return part
        parts.append(part)
    editor.discard(items)
    return call(op.target, parts, *op.args[1:], **op.kwargs)


SUM_RULES = (
    Rule(
        "add",
        find=chain(Op(ADD, dequantized("x"), dequantized("y"), name="op"), ACTIVATION, QUANTIZE),
        build=_add,
    ),
    Rule(
        "max_pool2d",
        find=chain(Op(MAX_POOL2D, dequantized("x"), name="op"), ACTIVATION, QUANTIZE),
        build=_max_pool,
    ),
    Rule(
        "average",
        find=chain(
            Op(ADAPTIVE_AVG_POOL2D + MEAN, dequantized("x"), name="op"), ACTIVATION, QUANTIZE
        ),
        build=_average,
    ),
    Rule("move", find=chain(Op(_MOVES, dequantized("x"), name="op"), QUANTIZE), build=_move),
    Rule("clamp", find=chain(dequantized("x"), ACTIVATION, QUANTIZE), build=_clamp),
    Rule("cat", find=chain(Op(CAT, Many("xs"), name="op"), QUANTIZE), build=_cat),
)
"""Operators without weights between integers."""
