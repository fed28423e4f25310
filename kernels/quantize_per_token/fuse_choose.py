"""Choosing qparams and quantizing with them become one launch: of rows, or of a whole tensor."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, TypeAlias

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.core.formats.format_ops import ChooseScales, DequantizeFloat, QuantizeFloat
from pt2e_quant.core.formats.number_formats import FP8_E4M3
from pt2e_quant.core.qdq import (
    ChoosePerTensor,
    ChoosePerTensorSymmetric,
    ChoosePerToken,
    DequantizePerTensorDynamic,
    DequantizePerToken,
    QuantizePerTensorDynamic,
    QuantizePerToken,
)
from pt2e_quant.graph.alias import mutated_roots, roots
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.kernels.profiler_range import label_of
from pt2e_quant.kernels.quantize_per_tensor.op import QuantizeTensor, QuantizeTensorE4m3
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRows, QuantizeRowsE4m3


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A site where qparams are chosen, and the call that chooses them and quantizes at once.

    Args:
        target: the operator; it takes a label.
        x: the tensor.
        arguments: what the operator takes behind it.
        results: how many it has.
        replaced: nodes, and which result stands for each.
    """

    target: Any
    x: Node
    arguments: tuple[object, ...]
    results: int
    replaced: tuple[tuple[Node, int], ...]


_Key: TypeAlias = tuple[object, Node, tuple[object, ...]]


def choose_at_once(gm: GraphModule, read: Callable[[Node], Choice | str | None]) -> PassResult:
    """Replace what `read` finds by its call.

    All that quantize one x alike read one call, unless something writes into x in between.

    Args:
        gm: is changed.
        read: of a node that chooses qparams: the choice, or why it stays; None of any other.
    """
    editor = Editor(gm)
    source_of = roots(gm.graph)
    written = mutated_roots(gm.graph)
    shared: dict[_Key, list[Node]] = {}
    notes: list[Note] = []
    for node in list(gm.graph.nodes):
        choice = read(node)
        if choice is None:
            continue
        if isinstance(choice, str):
            notes.append(Note(node.name, choice, skipped=True))
            continue
        x = choice.x
        key = (choice.target, x, choice.arguments)
        results = None if source_of.get(x, x) in written else shared.get(key)
        if results is None:
            results = shared[key] = _call(editor, choice, like=node)
            notes.append(Note(node.name, "chosen and quantized at once"))
        for old, place in choice.replaced:
            editor.replace(old, results[place])
        editor.discard([node])
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _call(editor: Editor, choice: Choice, *, like: Node) -> list[Node]:
    """The call in front of a node whose label and trace it takes, and a node for each result."""
    made = editor.call(
        choice.target, choice.x, *choice.arguments, label=label_of(like), like=like, before=like
    )
    return [editor.call(getitem, made, i, like=like, before=like) for i in range(choice.results)]


def quantizes_of(x: Node, qparams: list[Node], quantize: Any, dequantize: Any) -> list[Node]:
    """The quantizes of x by qparams; empty if the qparams have readers other than q/dq of x.

    Args:
        x: the tensor that they are chosen for.
        qparams: the nodes of the scale and the zero point.
        quantize: the operator.
        dequantize: the operator.
    """
    readers = list(dict.fromkeys(user for part in qparams for user in part.users))
    found = [n for n in readers if n.target is quantize and n.args[0] is x]
    others = [n for n in readers if n not in found and n.target is not dequantize]
    return [] if others else found


READ_BY_OTHERS = "its qparams are read by others too"


@graph_pass(needs=(), gives=())
def fuse_choose_quantize(gm: GraphModule) -> PassResult:
    """Replace choose_qparams and quantize per token by `pt2e_quant::quantize_per_token`.

    Before:  s, z = choose_qparams_per_token_asymmetric(x, int8);  q = quantize_per_token(x, s, z)
    After:   q, s, z = pt2e_quant.quantize_per_token(x, -128, 127)

    All that quantize one x per token read one launch, unless something writes into x in between.
    The scales are float32 and the zero points int32 then, which a dequantize per token takes too.
    """
    return choose_at_once(gm, _read)


def _read(choose: Node) -> Choice | str | None:
    if choose.target is not ChoosePerToken:
        return None
    found = integers_of(choose, QuantizePerToken, DequantizePerToken)
    if isinstance(found, str):
        return found
    x: Any = choose.args[0]
    limits, replaced = found
    return Choice(target=QuantizeRows, x=x, arguments=limits, results=3, replaced=replaced)


def integers_of(
    choose: Node, quantize: Any, dequantize: Any
) -> tuple[tuple[int, int], tuple[tuple[Node, int], ...]] | str:
    """The one range that a node's qparams quantize to, and what stands for integers and qparams.

    Args:
        choose: gives a scale and a zero point.
        quantize: the operator whose qparams they are.
        dequantize: the operator that may read them too.

    Returns:
        The range, and each node with 0 (integers), 1 (scale) or 2 (zero point); or why there is
        none.
    """
    x: Any = choose.args[0]
    parts = list(choose.users)
    quantizes = quantizes_of(x, parts, quantize, dequantize)
    ranges: set[Any] = {n.args[3:5] for n in quantizes}
    if len(ranges) != 1 or any(part.target is not getitem for part in parts):
        return READ_BY_OTHERS
    ((low, high),) = ranges
    taken = [(n, 0) for n in quantizes] + [(n, 1 + int(n.args[1])) for n in parts]  # type: ignore[arg-type]  # of getitem
    return (int(low), int(high)), tuple(taken)


@graph_pass(needs=(), gives=())
def fuse_choose_e4m3(gm: GraphModule) -> PassResult:
    """Replace choose_scales and quantize_float of rows by `pt2e_quant::quantize_per_token_e4m3`.

    Before:  s = choose_scales(x, [1, -1], 448);  q = quantize_float(x, s, [1, -1], float8_e4m3fn)
    After:   q, s = pt2e_quant.quantize_per_token_e4m3(x)

    All that quantize one x so read one launch, unless something writes into x in between.
    """
    return choose_at_once(gm, lambda node: codes_of(node, QuantizeRowsE4m3, _is_row))


def codes_of(
    choose: Node, target: Any, is_block: Callable[[Sequence[int]], bool]
) -> Choice | str | None:
    """The call for float32 scales at which each block's greatest is the format's.

    Args:
        choose: any node; choose_scales for blocks of another kind is none of ours.
        target: the operator that chooses such scales and quantizes to float8_e4m3fn.
        is_block: whether a block is of its kind.
    """
    if choose.target is not ChooseScales:
        return None
    x: Any = choose.args[0]
    _, tensor_scale, block, limit, dtype = choose.args
    is_plain = tensor_scale is None and dtype is torch.float32 and limit == FP8_E4M3.max
    if not is_plain or not is_block(block):  # type: ignore[arg-type]  # literals by schema
        return None
    quantizes = quantizes_of(x, [choose], QuantizeFloat, DequantizeFloat)
    alike = all(n.args[2] is None and n.args[4] == FP8_E4M3.name for n in quantizes)
    if not quantizes or not alike:
        return "its scales are read by others too"
    replaced = (*((n, 0) for n in quantizes), (choose, 1))
    return Choice(target=target, x=x, arguments=(), results=2, replaced=replaced)


def _is_row(block: Sequence[int]) -> bool:
    return len(block) > 1 and block[-1] == WHOLE and all(length == 1 for length in block[:-1])


_CHOOSERS = {ChoosePerTensor: False, ChoosePerTensorSymmetric: True}
"""Operators that choose int8 qparams of a tensor, to whether the zero point is 0."""


@graph_pass(needs=(), gives=())
def fuse_choose_tensor(gm: GraphModule) -> PassResult:
    """Replace choose_qparams and quantize of a tensor by `pt2e_quant::quantize_per_tensor`.

    Before:  s, z = choose_qparams(x, -128, 127, eps, int8);  q = quantize_per_tensor(x, s, z, …)
    After:   q, s, z = pt2e_quant.quantize_per_tensor(x, -128, 127, eps, False)

    All that quantize one x so read one call, unless something writes into x in between. The scale
    is float32 and the zero point int32 then, which a dequantize takes too.
    """
    return choose_at_once(gm, _read_tensor)


@graph_pass(needs=(), gives=())
def fuse_choose_tensor_e4m3(gm: GraphModule) -> PassResult:
    """Replace choose_scales and quantize_float of a tensor by `quantize_per_tensor_e4m3`.

    Before:  s = choose_scales(x, [-1, -1], 448);  q = quantize_float(x, s, [-1, -1], float8_e4m3fn)
    After:   q, s = pt2e_quant.quantize_per_tensor_e4m3(x)
    """
    return choose_at_once(gm, lambda node: codes_of(node, QuantizeTensorE4m3, _is_whole))


def _read_tensor(choose: Node) -> Choice | str | None:
    if choose.target not in _CHOOSERS:
        return None
    x: Any = choose.args[0]
    _, low, high, eps, dtype = choose.args
    if dtype is not torch.int8:
        return f"its integers are {dtype}"
    found = integers_of(choose, QuantizePerTensorDynamic, DequantizePerTensorDynamic)
    if isinstance(found, str):
        return found
    limits, replaced = found
    if limits != (low, high):
        return f"its qparams are chosen for {low} .. {high}, and {limits[0]} .. {limits[1]} taken"
    arguments = (*limits, float(eps), _CHOOSERS[choose.target])  # type: ignore[arg-type]  # a literal by schema
    return Choice(target=QuantizeTensor, x=x, arguments=arguments, results=3, replaced=replaced)


def _is_whole(block: Sequence[int]) -> bool:
    return len(block) > 0 and all(length == WHOLE for length in block)
