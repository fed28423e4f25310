"""Average pooling as a depthwise convolution: the delegate has no average pool in integers."""

import torch
from torch.fx import Node

from pt2e_quant.backends.xnnpack.conditions import pairs
from pt2e_quant.backends.xnnpack.passes.requantize_between import sole_quantize
from pt2e_quant.core.qdq import DequantizePerTensor, is_dequantize
from pt2e_quant.graph.ops import AVG_POOL2D, argument, aten
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Editor, Rule, Skip, rewrite

_ONE = 127
"""The integer that every weight is; 1/elements is stored exactly as 127 * scale."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def pool_by_depthwise(gm: torch.fx.GraphModule) -> PassResult:
    """Write a quantized average pool as a depthwise convolution with equal weights.

    Before:  q(avg_pool2d(dq(x_q), [2, 2]))
    After:   q(conv2d(dq(x_q), dq(weight_q), stride=[2, 2], groups=C)), weight_q 127 everywhere
    """
    return rewrite(gm, (Rule("avg_pool2d", find=Op(AVG_POOL2D, Var("x")), build=_build),))


def _build(m: Match, editor: Editor) -> Node | Skip:
    x, pool = m["x"], m.anchor
    if not is_dequantize(x) or sole_quantize(pool) is None:
        return Skip("it is float")
    channels = x.meta["val"].shape[1]
    kernel = pairs(argument(pool, "kernel_size"))
    stride = pairs(argument(pool, "stride") or kernel)
    padding = pairs(argument(pool, "padding"))
    counts_whole = argument(pool, "count_include_pad") or not any(padding)
    if not isinstance(channels, int) or argument(pool, "ceil_mode") or not counts_whole:
        return Skip("its windows count different numbers of elements")
    elements = argument(pool, "divisor_override") or kernel[0] * kernel[1]
    integers = torch.full((channels, 1, *kernel), _ONE, dtype=torch.int8)
    weight = editor.constant(f"{pool.name}.weight_q", integers, like=pool)
    scale = 1.0 / (_ONE * elements)
    held = editor.call(DequantizePerTensor, weight, scale, 0, -_ONE, _ONE, torch.int8, like=pool)
    return editor.call(
        aten.conv2d.default, x, held, None, stride, padding, [1, 1], channels, like=pool
    )
