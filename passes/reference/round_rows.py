"""Choose scales of run time for rows, and round by them, as a target does."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.integer_ops.calls import cast
from pt2e_quant.core.integer_ops.profiles import Quantization, RowQuantization
from pt2e_quant.core.integer_ops.quantize import quantize
from pt2e_quant.core.integer_ops.rows import choose_rows
from pt2e_quant.core.qdq import ChoosePerToken, QuantizePerToken
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import is_getitem
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult
from pt2e_quant.passes.reference.read_sites import emitter


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
            _write(editor, node, by)
            notes.append(Note(node.name, f"rows as the target rounds them: {by.value}"))
        return PassResult(editor.finish(), tuple(notes))

    return GraphPass("round_rows", edit, needs=(HAS_VALUES,), gives=())


def _is_int8(choose: Node) -> bool:
    return choose.args[1] is torch.int8


def _write(editor: Editor, choose: Node, by: RowQuantization) -> None:
    x: Any = choose.args[0]
    call = emitter(editor, choose)
    if x.meta["val"].dtype is not torch.float32:
        x = cast(call, x, torch.float32)
    rows = choose_rows(call, x, by)
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
