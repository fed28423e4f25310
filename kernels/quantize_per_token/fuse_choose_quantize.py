"""Choosing qparams per token and quantizing with them become one launch."""

from operator import getitem
from typing import Any, TypeAlias

from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import ChoosePerToken, DequantizePerToken, QuantizePerToken
from pt2e_quant.graph.alias import mutated_roots, roots
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.kernels.quantize_per_token.one_launch import one_launch
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRows

__all__ = ["fuse_choose_quantize"]

_Key: TypeAlias = tuple[Node, int, int]
_Results: TypeAlias = tuple[Node, Node, Node]


@graph_pass()
def fuse_choose_quantize(gm: GraphModule) -> PassResult:
    """Replace choose_qparams and quantize per token by `pt2e_quant::quantize_per_token`.

    Before:  s, z = choose_qparams_per_token_asymmetric(x, int8);  q = quantize_per_token(x, s, z)
    After:   q, s, z = pt2e_quant.quantize_per_token(x, -128, 127)

    All that quantize one x per token read one launch, unless something writes into x in between.
    The scales are float32 and the zero points int32 then, which a dequantize per token takes too.
    """
    editor = Editor(gm)
    source_of = roots(gm.graph)
    written = mutated_roots(gm.graph)
    shared: dict[_Key, _Results] = {}
    notes: list[Note] = []
    for choose in list(gm.graph.nodes):
        if choose.target is not ChoosePerToken:
            continue
        quantizes = _quantizes(choose)
        if not quantizes:
            notes.append(Note(choose.name, "its qparams are read by others too", skipped=True))
            continue
        x: Any = choose.args[0]
        arguments: Any = quantizes[0].args
        low, high = int(arguments[3]), int(arguments[4])
        key = (x, low, high)
        results = None if source_of.get(x, x) in written else shared.get(key)
        if results is None:
            integers, scale, zero_point = one_launch(
                editor, QuantizeRows, x, low, high, like=choose, results=3
            )
            results = shared[key] = integers, scale, zero_point
            notes.append(Note(choose.name, "chosen and quantized in one launch"))
        _redirect(editor, choose, quantizes, results)
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _quantizes(choose: Node) -> list[Node]:
    """The quantizes of the tensor that qparams are chosen for, all of one range.

    Empty if anything but q/dq per token reads the qparams.
    """
    readers = list(dict.fromkeys(user for part in choose.users for user in part.users))
    quantizes = [n for n in readers if n.target is QuantizePerToken and n.args[0] is choose.args[0]]
    others = [n for n in readers if n not in quantizes and n.target is not DequantizePerToken]
    ranges = {n.args[3:5] for n in quantizes}
    if others or len(ranges) != 1 or any(part.target is not getitem for part in choose.users):
        return []
    return quantizes


def _redirect(editor: Editor, choose: Node, quantizes: list[Node], results: _Results) -> None:
    integers, scale, zero_point = results
    for quantize in quantizes:
        editor.replace(quantize, integers)
    for taken in list(choose.users):
        editor.replace(taken, scale if taken.args[1] == 0 else zero_point)
    editor.discard([choose])
