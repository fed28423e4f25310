"""Write operators the way ExecuTorch's partitioner recognises them; values stay the same.

The partitioner matches one overload of each: a `clamp` after a convolution keeps the convolution
out of the delegate where the equal `hardtanh` lets it in, and one symbolic size in a reshape keeps
the reshape out where `-1` lets it in.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.backends.target.requantize_between import between
from pt2e_quant.backends.xnnpack.passes.simplify import RRELU
from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.graph.meta import fake_value
from pt2e_quant.graph.ops import (
    ADAPTIVE_AVG_POOL2D,
    AVG_POOL2D,
    BMM,
    CAT,
    CLAMP,
    HARDTANH,
    LINEAR,
    MATMUL,
    MEAN,
    PAD,
    RESHAPE,
    SELECT,
    SOFTMAX,
    SQUEEZE,
    UNSQUEEZE,
    argument,
    arguments,
    aten,
    each_axis,
    is_call,
)
from pt2e_quant.graph.pattern import Many, Match, Op, Var, one_of
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Editor, Rule, Skip, rewrite

_CLAMPS = one_of(
    CLAMP,
    (aten.relu6.default, aten.relu6_.default),
    (aten.clamp_min.default, aten.clamp_min_.default, aten.clamp_max.default),
)


@graph_pass(needs=(HAS_VALUES,), gives=())
def normalize_overloads(gm: torch.fx.GraphModule) -> PassResult:
    """Rewrite clamps, reshapes, pooling, splits and matmuls into the partitioner's overloads.

    Before:  q(clamp(conv2d(dq, dq), 0, 6));       flatten(x, 1) at batch s0
    After:   q(hardtanh(conv2d(dq, dq), 0, 6));    view(x, [-1, 512])
    """
    return rewrite(gm, RULES)


def view_shape(sizes: Sequence[int | torch.SymInt]) -> list[int] | None:
    """Sizes with -1 for the one that is symbolic.

    None if several are, or if a size of 0 beside it leaves open how many that one is.
    """
    known = [s.node.maybe_as_int() if isinstance(s, torch.SymInt) else s for s in sizes]
    found = [-1 if size is None else int(size) for size in known]
    return None if found.count(-1) > 1 or (-1 in found and 0 in found) else found


_CONTIGUOUS = one_of(
    LINEAR, MATMUL, BMM, SOFTMAX, (aten.view.default, aten.clone.default, aten.mean.dim)
)
"""Operators whose result is contiguous whatever their inputs are."""

_LIMITS = {"min": -math.inf, "max": math.inf}


def _clamp(m: Match, editor: Editor) -> Node | Skip:
    if not m.anchor.meta["val"].is_floating_point():
        return Skip("the delegate takes floats only")
    name = str(m.anchor.target)
    if "relu6" in name:
        low, high = 0.0, 6.0
    else:
        kind = "max" if "clamp_max" in name else "min" if "clamp_min" in name else ""
        given = {at: argument(m.anchor, at) if kind in ("", at) else None for at in _LIMITS}
        if any(isinstance(limit, Node) for limit in given.values()):
            return Skip("its limits are computed at run time")
        low, high = (
            default if (limit := given[at]) is None else float(limit)
            for at, default in _LIMITS.items()
        )
    low = min(low, high)  # as ATen defines it; XNNPACK refuses limits in the other order
    x, val = m["x"], m.anchor.meta["val"]
    if low == 0.0 and high == math.inf:
        return editor.call(aten.relu.default, x, like=m.anchor, val=val)
    # The payload's schema stores float32 limits: its largest number stands for no limit.
    widest = torch.finfo(torch.float32).max
    return editor.call(
        aten.hardtanh.default, x, max(low, -widest), min(high, widest), like=m.anchor, val=val
    )


def _hardtanh(m: Match, editor: Editor) -> Node | Skip:
    if len(m.anchor.args) == 3 and m.anchor.target is aten.hardtanh.default:
        return Skip("it has that form already")
    low, high = argument(m.anchor, "min_val"), argument(m.anchor, "max_val")
    val = m.anchor.meta["val"]
    return editor.call(aten.hardtanh.default, m["x"], low, high, like=m.anchor, val=val)


def view(editor: Editor, x: Node, shape: list[int], like: Node) -> Node:
    """A view that holds whatever the strides of `x`; `copies` drops the clone again.

    Strides are not read off `x`: an operator that was written out may have others than its
    value says.
    """
    if not _gives_contiguous(x):
        x = editor.call(aten.clone.default, x, memory_format=torch.contiguous_format, like=like)
    val = fake_value(editor.mode, aten.reshape.default, (editor.now(x), shape), {})
    return editor.call(aten.view.default, x, shape, like=like, val=val)


def _gives_contiguous(x: Node) -> bool:
    while is_qdq(x) and isinstance(x.args[0], Node):
        x = x.args[0]
    return is_call(x, _CONTIGUOUS)


def _reshape(m: Match, editor: Editor) -> Node | Skip:
    shape = view_shape(m.anchor.meta["val"].shape)
    if shape is None:
        return Skip("its sizes cannot be written with one unknown")
    known = m.anchor.args[1] if len(m.anchor.args) > 1 else None
    if m.anchor.target is aten.view.default and isinstance(known, (list, tuple)):
        if all(isinstance(s, int) for s in known) and _gives_contiguous(m["x"]):
            return Skip("it has that form already")
    return view(editor, m["x"], shape, m.anchor)


def _mean(m: Match, editor: Editor) -> Node | Skip:
    x = m["x"]
    dims = argument(m.anchor, "dim")
    rank = x.meta["val"].dim()
    if rank != 4 or sorted(d % rank for d in dims or ()) != [2, 3]:
        return Skip("it is not over the last two of four dimensions")
    if argument(m.anchor, "dtype") is not None:
        return Skip("it changes the dtype")
    if argument(m.anchor, "keepdim"):
        return Skip("it has that form already")
    shape = view_shape(m.anchor.meta["val"].shape)
    if shape is None:
        return Skip("its sizes cannot be written with one unknown")
    mean = editor.call(aten.mean.dim, x, [2, 3], True, like=m.anchor)
    return editor.call(aten.view.default, between(editor, mean, m.anchor), shape, like=m.anchor)


def _pool(m: Match, editor: Editor) -> Node | Skip:
    if each_axis(argument(m.anchor, "output_size"), 2) != [1, 1] or m["x"].meta["val"].dim() != 4:
        return Skip("it pools to more than one element")
    return editor.call(aten.mean.dim, m["x"], [2, 3], True, like=m.anchor)


def _select(m: Match, editor: Editor) -> Node | Skip:
    if m.anchor.target is not aten.select.int:
        return Skip("it keeps its dimension")
    x, value = m["x"], m.anchor.meta["val"]
    dim, index = int(argument(m.anchor, "dim")), argument(m.anchor, "index")
    shape = view_shape(value.shape)
    if shape is None or not isinstance(index, int):
        return Skip("two or more of its sizes are dynamic, or its index is")
    size = x.meta["val"].shape[dim]
    if not isinstance(size, int):
        return Skip("it selects in a dynamic dimension")
    start = index % size
    part = editor.call(aten.slice.Tensor, x, dim, start, start + 1, like=m.anchor)
    return view(editor, between(editor, part, m.anchor), shape, m.anchor)


def _matmul(m: Match, editor: Editor) -> Node | Skip:
    a, b = m["a"], m["b"]
    left, right = a.meta["val"], b.meta["val"]
    if left.dim() != right.dim() or left.dim() < 3:
        return Skip("it is no batched product")
    if any(str(p) != str(q) for p, q in zip(left.shape[:-2], right.shape[:-2], strict=True)):
        return Skip("its batch dimensions differ")
    if left.dim() == 3:
        return editor.call(aten.bmm.default, a, b, like=m.anchor)
    back, first, second = view_shape(m.anchor.meta["val"].shape), _flat(left), _flat(right)
    if back is None or first is None or second is None:
        return Skip("its sizes cannot be written with one unknown")
    flat_a = view(editor, a, first, m.anchor)
    flat_b = view(editor, b, second, m.anchor)
    product = editor.call(aten.bmm.default, flat_a, flat_b, like=m.anchor)
    return editor.call(aten.view.default, product, back, like=m.anchor)


def _flat(value: Tensor) -> list[int] | None:
    """The sizes with all batch dimensions as one, -1 for the dynamic one; None if several are."""
    leading = value.shape[:-2]
    batch = math.prod(leading) if all(isinstance(s, int) for s in leading) else -1
    sizes = [batch, *(s if isinstance(s, int) else -1 for s in value.shape[-2:])]
    several = sum(not isinstance(s, int) for s in value.shape) > 1
    return None if several else sizes


def _max_pool(m: Match, editor: Editor) -> Node | Skip:
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    kernel, stride, padding, dilation, ceil = (argument(m.anchor, n) for n in names)
    full = [each_axis(v, 2) for v in (kernel, stride or kernel, padding, dilation)]
    if list(m.anchor.args[1:]) == [*full, ceil]:
        return Skip("it has that form already")
    val = m.anchor.meta["val"]
    return editor.call(m.anchor.target, m["x"], *full, ceil, like=m.anchor, val=val)


def _avg_pool(m: Match, editor: Editor) -> Node | Skip:
    names = ("kernel_size", "stride", "padding")
    kernel, stride, padding = (argument(m.anchor, n) for n in names)
    windows = [each_axis(v, 2) for v in (kernel, stride or kernel, padding)]
    if list(m.anchor.args[1:4]) == windows:
        return Skip("it has that form already")
    rest = [argument(m.anchor, n) for n in ("ceil_mode", "count_include_pad")]
    divisor = argument(m.anchor, "divisor_override")
    if divisor is not None:  # ExecuTorch takes one that is given as None for another
        rest.append(divisor)
    val = m.anchor.meta["val"]
    return editor.call(m.anchor.target, m["x"], *windows, *rest, like=m.anchor, val=val)


def _pad(m: Match, editor: Editor) -> Node | Skip:
    """A pad that crops as slices and a pad: ExecuTorch's own takes no negative sizes."""
    pads = argument(m.anchor, "pad")
    mode = arguments(m.anchor).get("mode", "constant")
    if mode != "constant":
        return Skip("it repeats values of its input")
    if not all(isinstance(p, int) for p in pads) or min(pads) >= 0:
        return Skip("it crops nothing, or its sizes are known only at run time")
    x: Node = m["x"]
    for index in range(0, len(pads), 2):
        start, end = (-min(p, 0) for p in pads[index : index + 2])
        if start or end:
            dim = x.meta["val"].dim() - 1 - index // 2
            last = -end if end else sys.maxsize
            x = editor.call(aten.slice.Tensor, x, dim, start, last, like=m.anchor)
    added = [max(p, 0) for p in pads]
    if not any(added):
        return x
    value = argument(m.anchor, "value") or 0
    return editor.call(aten.constant_pad_nd.default, x, added, value, like=m.anchor)


_ZEROS = {
    aten.empty.memory_format: aten.zeros.default,
    aten.empty_like.default: aten.zeros_like.default,
    aten.new_empty.default: aten.new_zeros.default,
}


def _zeros(m: Match, editor: Editor) -> Node:
    """Zeros for values that are open: ExecuTorch's `empty` has the example's sizes alone."""
    kwargs: Any = {k: v for k, v in m.anchor.kwargs.items() if k != "memory_format"}
    target: Any = _ZEROS[m.anchor.target]
    return editor.call(target, *m.anchor.args, like=m.anchor, **kwargs)


def _cat(m: Match, editor: Editor) -> Node | Skip:
    """A cat without the tensors that have no elements: ExecuTorch's memory planning stops there."""
    tensors: list[Node] = argument(m.anchor, "tensors")
    kept = [t for t in tensors if not _is_empty(t.meta["val"])]
    if not kept:
        whole = str(m.anchor.meta["val"].shape)
        return next(
            (t for t in tensors if str(t.meta["val"].shape) == whole),
            Skip("none of its tensors has an element, and none has its result's shape"),
        )
    if len(kept) == len(tensors):
        return Skip("each of its tensors has elements")
    return editor.call(aten.cat.default, kept, argument(m.anchor, "dim"), like=m.anchor)


def _is_empty(value: Tensor) -> bool:
    return any(isinstance(size, int) and size == 0 for size in value.shape)


_X = Var("x")
RULES = (
    Rule("clamp", find=Op(_CLAMPS, _X), build=_clamp),
    Rule("hardtanh", find=Op(HARDTANH, _X, users=None), build=_hardtanh),
    Rule("reshape", find=Op(one_of(RESHAPE, SQUEEZE, UNSQUEEZE), _X), build=_reshape),
    Rule("mean", find=Op(MEAN, _X), build=_mean),
    Rule("adaptive_avg_pool2d", find=Op(ADAPTIVE_AVG_POOL2D, _X), build=_pool),
    Rule("select", find=Op(SELECT, _X), build=_select),
    Rule("max_pool2d", find=Op(aten.max_pool2d.default, _X), build=_max_pool),
    Rule("avg_pool2d", find=Op(AVG_POOL2D, _X), build=_avg_pool),
    Rule("pad", find=Op(PAD, _X), build=_pad),
    Rule("matmul", find=Op(MATMUL, Var("a"), Var("b")), build=_matmul),
    Rule("cat", find=Op(CAT, Many("xs")), build=_cat),
    *(Rule("empty", find=Op(overload), build=_zeros) for overload in _ZEROS),
    RRELU,
)
