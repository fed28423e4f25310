"""Choosing scales of rows and quantizing to 8-bit floats with them become one launch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.core.formats.format_ops import ChooseScales, DequantizeFloat, QuantizeFloat
from pt2e_quant.core.formats.number_formats import FP8_E4M3
from pt2e_quant.graph.pipeline import PassResult, graph_pass
from pt2e_quant.kernels.quantize_per_token.one_launch import Choice, choose_at_once, quantizes_of
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRowsE4m3


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
