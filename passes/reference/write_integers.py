"""Write a q/dq graph in exact integer arithmetic: its operators, then the q/dq that are left.

The result is the reference for every lowering.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.integer_ops.calls import Call, cast
from pt2e_quant.core.integer_ops.profiles import Quantization, RowQuantization
from pt2e_quant.core.integer_ops.quantize import (
    WRITTEN_KINDS,
    choose_one_row,
    choose_rows,
    dequantize,
    quantize,
)
from pt2e_quant.core.qdq import (
    ChoosePerToken,
    QdqKind,
    QuantizePerToken,
    is_quantize,
    kind_of_qdq,
    read_qparams,
)
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import aten, is_getitem
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult
from pt2e_quant.passes.reference.forms.site import (
    DEFAULT_ARITHMETIC,
    Arithmetic,
    Declined,
    Overflow,
)
from pt2e_quant.passes.reference.read_sites import FoundSite, Reader, emitter, find_sites, literal


def write_integers(
    arithmetic: Arithmetic = DEFAULT_ARITHMETIC, floats: Set[str] = frozenset()
) -> GraphPass:
    """The pass that computes in integers what stands between dequantizes and a quantize.

    Before:  quantize(relu(conv2d(dequantize(x), dequantize(w), b)))
    After:   total = out_dtype(convolution, int32, x.to(int16) - x_zero, w.to(int16)) + b_q
             (clamp(round(total.to(float32) * factor), 0, …) + zero).to(int8)

    The definitions are the forms of `passes.reference.forms`. Where one declines, the q/dq stay.

    Args:
        arithmetic: how the target rounds.
        floats: names of operators that stay float.
    """

    def edit(gm: GraphModule) -> PassResult:
        sites = [site for site in find_sites(gm) if floats.isdisjoint(site.names)]
        if not sites:
            return PassResult(changed=False)
        editor = Editor(gm)
        reader = Reader(editor, arithmetic)
        notes = tuple(_write(reader, site) for site in sites)
        return PassResult(changed=editor.finish(), notes=notes)

    return GraphPass("integer_reference", edit, needs=(), gives=())


def _write(reader: Reader, found: FoundSite) -> Note:
    editor, anchor = reader.editor, found.anchor
    mark = editor.mark()
    editor.cursor = anchor
    site = reader.site(found)
    try:
        made = found.form.write(site)
    except Overflow as overflow:
        fix = "accumulator_bits=64, or a scheme of fewer bits for this node"
        raise Overflow(overflow.what, node=found.op, fix=fix) from overflow
    except Declined as declined:
        editor.roll_back(mark)
        return Note(anchor.name, declined.what, skipped=True)
    finally:
        editor.cursor = None
    editor.replace(anchor, made)
    editor.discard(found.covered)
    return Note(anchor.name, "; ".join((found.form.name, *site.remarks)))


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
    """Scale and zero point of a q/dq: numbers, or nodes that broadcast against its tensor.

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


def round_rows(by: RowQuantization) -> GraphPass:
    """The pass that writes the target's arithmetic in the place of torch's operators per token.

    Before:  s, z = choose_qparams_per_token_asymmetric(x, int8); q = quantize_per_token(x, s, z, …)
    After:   q = clamp(round(x * factor) + z, -128, 127).to(int8), with s, factor and z of each row

    torch's operators round in float64 and add z before that; RowQuantization.DOUBLE keeps them.
    """

    def edit(gm: GraphModule) -> PassResult:
        if by is RowQuantization.DOUBLE:
            return PassResult(changed=False)
        editor = Editor(gm)
        chosen = [n for n in gm.graph.nodes if n.target is ChoosePerToken and _is_int8(n)]
        notes = []
        for node in chosen:
            _write_rows(editor, node, by)
            notes.append(Note(node.name, f"rows as the target rounds them: {by.value}"))
        return PassResult(editor.finish(), tuple(notes))

    return GraphPass("round_rows", edit, needs=(HAS_VALUES,), gives=())


def _is_int8(choose: Node) -> bool:
    return choose.args[1] is torch.int8


def _write_rows(editor: Editor, choose: Node, by: RowQuantization) -> None:
    x: Any = choose.args[0]
    call = emitter(editor, choose)
    if x.meta["val"].dtype is not torch.float32:
        x = cast(call, x, torch.float32)
    rows = choose_rows(call, x, by)
    if by is RowQuantization.DIVIDED and all(size == 1 for size in x.meta["val"].shape[:-1]):
        rows = choose_one_row(call, x)
    made = {0: cast(call, rows.scale, torch.float64), 1: cast(call, rows.zero_point, torch.int64)}
    parts = [user for user in choose.users if is_getitem(user)]
    readers = dict.fromkeys(user for part in parts for user in part.users)
    for node in [reader for reader in readers if reader.target is QuantizePerToken]:
        limits: Any = node.args[3:5]
        divides = Quantization.DIVIDED if by is RowQuantization.DIVIDED else Quantization.INVERSE
        integers = quantize(
            emitter(editor, node),
            x,
            rows.factor,
            rows.zero_point,
            limits=limits,
            storage=node.meta["val"].dtype,
            by=divides,
        )
        editor.replace(node, integers)
    for part in parts:
        editor.replace(part, made[int(part.args[1])])  # type: ignore[arg-type]  # 0 or 1
