"""Pools in the form that kernels have: sizes rounded down, windows of one size."""

from math import prod
from typing import Any

from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import (
    ADAPTIVE_AVG_POOL1D,
    ADAPTIVE_AVG_POOL2D,
    AVG_POOL1D,
    AVG_POOL2D,
    MAX_POOL1D,
    MAX_POOL3D,
    argument,
    arguments,
    aten,
    each_axis,
)
from pt2e_quant.graph.pattern import Match, Op, Var, one_of
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite

_ROUNDED = one_of(
    MAX_POOL1D,
    (aten.max_pool2d.default,),
    MAX_POOL3D,
    AVG_POOL1D,
    AVG_POOL2D,
    (aten.avg_pool3d.default,),
)
_ADAPTIVE: dict[Any, Any] = {
    ADAPTIVE_AVG_POOL1D: aten.avg_pool1d.default,
    ADAPTIVE_AVG_POOL2D: aten.avg_pool2d.default,
}


def _rounded_down(node: Node) -> list[Any]:
    """The spatial sizes that a pool would give without `ceil_mode`."""
    given, axes = arguments(node), _axes(node)
    sizes = node.all_input_nodes[0].meta["val"].shape[-axes:]
    kernel, padding = (each_axis(given[name], axes) for name in ("kernel_size", "padding"))
    stride = each_axis(given["stride"] or kernel, axes)
    dilation = each_axis(given.get("dilation", 1), axes)
    spread = zip(sizes, kernel, stride, padding, dilation, strict=True)
    return [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in spread]


def _axes(node: Node) -> int:
    """How many axes a pool has, by its name: `aten.avg_pool2d.default` has two."""
    name = str(node.target).split(".")[1]
    return int(name[-2])


def _round_down(m: Match, editor: Editor) -> Node | Skip:
    pool = m.anchor
    given = arguments(pool)
    if not given["ceil_mode"]:
        return Skip("it rounds down")
    sizes = pool.meta["val"].shape[-_axes(pool) :]
    if not all(
        statically_known_true(a == b) for a, b in zip(sizes, _rounded_down(pool), strict=True)
    ):
        return Skip("its last windows reach over the end")
    given |= {"ceil_mode": False, next(iter(given)): m["x"]}
    if given.get("divisor_override", 1) is None:
        del given["divisor_override"]
    return editor.call(pool.target, *given.values(), like=pool, val=pool.meta["val"])


def _fixed_windows(m: Match, editor: Editor) -> Node | Skip:
    pool, value = m.anchor, m["x"].meta["val"]
    axes = _axes(pool)
    wanted = each_axis(argument(pool, "output_size"), axes)
    sizes = value.shape[-axes:]
    if not all(isinstance(size, int) for size in sizes):
        return Skip("its windows depend on run-time sizes")
    if prod(wanted) <= 1:
        return Skip("its window is the whole tensor")
    if any(size % count for size, count in zip(sizes, wanted, strict=True)):
        return Skip("its windows have several sizes")
    kernel = [size // count for size, count in zip(sizes, wanted, strict=True)]
    if kernel == [1] * axes:
        return editor.now(m.node("x"))
    target = next(made for found, made in _ADAPTIVE.items() if pool.target in found)
    return editor.call(target, m["x"], kernel, kernel, like=pool, val=pool.meta["val"])


@graph_pass(needs=(HAS_VALUES,), gives=())
def fixed_windows(gm: GraphModule) -> PassResult:
    """Drop `ceil_mode` where it adds no window, and give adaptive pools a kernel where one fits.

    A backend's kernel divides each window by the same number. Of these pools all windows have the
    same size, which their arguments do not say: a ResNet-D pools by 2 with `ceil_mode` at even
    sizes.

    Before:  avg_pool2d(x[1, 8, 6, 6], [2, 2], ceil_mode=True);  adaptive_avg_pool2d(x, [3, 3])
    After:   avg_pool2d(x, [2, 2]);                              avg_pool2d(x, [2, 2], [2, 2])
    """
    adaptive = one_of(ADAPTIVE_AVG_POOL1D, ADAPTIVE_AVG_POOL2D)
    rules = (
        Rule("rounds down", Op(_ROUNDED, Var("x")), _round_down),
        Rule("has a kernel", Op(adaptive, Var("x")), _fixed_windows),
    )
    return rewrite(gm, rules)
