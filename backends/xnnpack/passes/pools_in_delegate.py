"""Average pools in the forms that the delegate has.

It averages floats over windows that leave out the padding, and has no average pools in integers:
what is asked in another way is computed element by element by ExecuTorch's kernel
(`benchmarks/delegated_functions.py` has the times).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional

from pt2e_quant.backends.target.float_retries import is_left_plain
from pt2e_quant.backends.target.requantize_between import sole_quantize
from pt2e_quant.core.qdq import DequantizePerTensor, is_dequantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import AVG_POOL2D, argument, aten, each_axis
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite

_ONE = 127
"""The integer that every weight is; 1/elements is stored exactly as 127 * scale."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def pool_by_depthwise(gm: GraphModule) -> PassResult:
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
    kernel = each_axis(argument(pool, "kernel_size"), 2)
    stride = each_axis(argument(pool, "stride") or kernel, 2)
    padding = each_axis(argument(pool, "padding"), 2)
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


@graph_pass(needs=(HAS_VALUES,), gives=())
def average_in_delegate(gm: GraphModule) -> PassResult:
    """Write float average pools with the arguments that the delegate takes.

    Zeros around the tensor are counted where the pool counts its padding; where it counts fewer
    elements in some windows, their averages are multiplied by a constant.

    Before:  avg_pool2d(x, [3, 3], [2, 2], [1, 1])
    After:   avg_pool2d(pad(x, [1, 1, 1, 1]), [3, 3], [2, 2], [0, 0], False, False)

    Before:  avg_pool2d(x[1, 8, 5, 5], [2, 2], ceil_mode=True)
    After:   mul(avg_pool2d(pad(x, [0, 1, 0, 1]), [2, 2], …), factors)
    """
    return rewrite(gm, (Rule("avg_pool2d", find=Op(AVG_POOL2D, Var("x")), build=_average),))


def _average(m: Match, editor: Editor) -> Node | Skip:
    x, pool = m["x"], m.anchor
    value = x.meta["val"]
    if value.dim() != 4 or value.dtype is not torch.float32:
        return Skip("it is no batch of images in float32")
    if is_left_plain(pool):
        return Skip("its form for the delegate was wrong")
    kernel = each_axis(argument(pool, "kernel_size"), 2)
    stride = each_axis(argument(pool, "stride") or kernel, 2)
    padding = each_axis(argument(pool, "padding"), 2)
    if kernel == [1, 1]:
        return Skip("the delegate has no windows of one element")
    ceil, counts, divisor = (
        argument(pool, name) for name in ("ceil_mode", "count_include_pad", "divisor_override")
    )
    if not (ceil or divisor or (counts and any(padding))):
        # The windows are whole, or leave out the padding.
        return editor.call(
            pool.target, x, kernel, stride, padding, False, False, like=pool, val=pool.meta["val"]
        )
    behind = list(padding)
    factors = torch.ones(1)
    if ceil:
        size, count = value.shape[2:], pool.meta["val"].shape[2:]
        if not all(isinstance(number, int) for number in (*size, *count)):
            return Skip("which windows reach over the end depends on run-time sizes")
        for axis in (0, 1):
            end = (count[axis] - 1) * stride[axis] + kernel[axis]
            behind[axis] = max(end - size[axis] - padding[axis], 0)
    around = [padding[1], behind[1], padding[0], behind[0]]
    if divisor:
        factors = torch.tensor([kernel[0] * kernel[1] / divisor])
    elif ceil:
        factors = _counted(value.shape[2:], (kernel, stride, padding), around, counts)
    if any(around):
        x = editor.call(aten.constant_pad_nd.default, x, around, 0.0, like=pool)
    means = editor.call(pool.target, x, kernel, stride, [0, 0], False, False, like=pool)
    if bool((factors == 1).all()):
        return means
    held = editor.constant(f"{pool.name}.factors", factors, like=pool)
    return editor.call(aten.mul.Tensor, means, held, like=pool)


def _counted(
    size: Sequence[int], windows: Sequence[list[int]], around: list[int], counts: bool
) -> Tensor:
    """By how much the elements of a window are more than those that the pool divides by."""
    kernel, stride, padding = windows
    ones = torch.ones(1, 1, *size, dtype=torch.float64)
    asked = functional.avg_pool2d(ones, kernel, stride, padding, True, counts)
    made = functional.avg_pool2d(functional.pad(ones, around), kernel, stride)
    return (asked / made).float()
