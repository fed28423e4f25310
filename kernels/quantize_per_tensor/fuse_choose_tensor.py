"""Choosing qparams of a whole tensor and quantizing with them become one call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.core.qdq import (
    ChoosePerTensor,
    ChoosePerTensorSymmetric,
    DequantizePerTensorDynamic,
    QuantizePerTensorDynamic,
)
from pt2e_quant.graph.pipeline import PassResult, graph_pass
from pt2e_quant.kernels.quantize_per_tensor.op import QuantizeTensor, QuantizeTensorE4m3
from pt2e_quant.kernels.quantize_per_token.fuse_choose_e4m3 import codes_of
from pt2e_quant.kernels.quantize_per_token.fuse_choose_quantize import integers_of
from pt2e_quant.kernels.quantize_per_token.one_launch import Choice, choose_at_once

_CHOOSERS = {ChoosePerTensor: False, ChoosePerTensorSymmetric: True}
"""What chooses int8 qparams of a tensor, to whether the zero point is 0."""


@graph_pass(needs=(), gives=())
def fuse_choose_tensor(gm: GraphModule) -> PassResult:
    """Replace choose_qparams and quantize of a tensor by `pt2e_quant::quantize_per_tensor`.

    Before:  s, z = choose_qparams(x, -128, 127, eps, int8);  q = quantize_per_tensor(x, s, z, …)
    After:   q, s, z = pt2e_quant.quantize_per_tensor(x, -128, 127, eps, False)

    All that quantize one x so read one call, unless something writes into x in between. The scale
    is float32 and the zero point int32 then, which a dequantize takes too.
    """
    return choose_at_once(gm, _read)


@graph_pass(needs=(), gives=())
def fuse_choose_tensor_e4m3(gm: GraphModule) -> PassResult:
    """Replace choose_scales and quantize_float of a tensor by `quantize_per_tensor_e4m3`.

    Before:  s = choose_scales(x, [-1, -1], 448);  q = quantize_float(x, s, [-1, -1], float8_e4m3fn)
    After:   q, s = pt2e_quant.quantize_per_tensor_e4m3(x)
    """
    return choose_at_once(gm, lambda node: codes_of(node, QuantizeTensorE4m3, _is_whole))


def _read(choose: Node) -> Choice | str | None:
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
