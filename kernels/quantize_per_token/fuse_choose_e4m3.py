"""Choosing scales of rows and quantizing to 8-bit floats with them become one launch."""

from typing import TypeAlias

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.blocks import WHOLE
from pt2e_quant.core.format_ops import ChooseScales, DequantizeFloat, QuantizeFloat
from pt2e_quant.core.number_formats import FP8_E4M3
from pt2e_quant.graph.alias import mutated_roots, roots
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.kernels.quantize_per_token.one_launch import one_launch
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRowsE4m3

__all__ = ["fuse_choose_e4m3"]

_Results: TypeAlias = tuple[Node, Node]


@graph_pass()
def fuse_choose_e4m3(gm: GraphModule) -> PassResult:
    """Replace choose_scales and quantize_float of rows by `pt2e_quant::quantize_per_token_e4m3`.

    Before:  s = choose_scales(x, [1, -1], 448);  q = quantize_float(x, s, [1, -1], float8_e4m3fn)
    After:   q, s = pt2e_quant.quantize_per_token_e4m3(x)

    All that quantize one x so read one launch, unless something writes into x in between.
    """
    editor = Editor(gm)
    source_of = roots(gm.graph)
    written = mutated_roots(gm.graph)
    shared: dict[Node, _Results] = {}
    notes: list[Note] = []
    for choose in list(gm.graph.nodes):
        if not _is_of_rows(choose):
            continue
        quantizes = _quantizes(choose)
        if not quantizes:
            notes.append(Note(choose.name, "its scales are read by others too", skipped=True))
            continue
        x: Node = choose.args[0]
        results = None if source_of.get(x, x) in written else shared.get(x)
        if results is None:
            codes, scale = one_launch(editor, QuantizeRowsE4m3, x, like=choose, results=2)
            results = shared[x] = codes, scale
            notes.append(Note(choose.name, "chosen and quantized in one launch"))
        for quantize in quantizes:
            editor.replace(quantize, results[0])
        editor.replace(choose, results[1])
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _is_of_rows(node: Node) -> bool:
    """Whether a node finds float32 scales at which each row's greatest is the format's."""
    if node.target is not ChooseScales:
        return False
    _, tensor_scale, block, limit, dtype = node.args
    is_plain = tensor_scale is None and dtype is torch.float32
    return is_plain and bool(limit == FP8_E4M3.max) and _is_row(block)


def _is_row(block: object) -> bool:
    if not isinstance(block, list | tuple) or len(block) < 2:
        return False
    return block[-1] == WHOLE and all(length == 1 for length in block[:-1])


def _quantizes(choose: Node) -> list[Node]:
    """The quantizes of the tensor that scales are chosen for; empty if others read the scales."""
    readers = list(choose.users)
    quantizes = [n for n in readers if n.target is QuantizeFloat and n.args[0] is choose.args[0]]
    others = [n for n in readers if n not in quantizes and n.target is not DequantizeFloat]
    alike = all(n.args[2] is None and n.args[4] == FP8_E4M3.name for n in quantizes)
    return quantizes if alike and not others else []
