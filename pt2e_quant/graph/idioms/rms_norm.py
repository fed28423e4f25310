"""Division by a root mean square, as models write it out: Llama, T5, Gemma and others."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Graph, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.idioms.composite import define_composite
from pt2e_quant.graph.ops import (
    ADD,
    DIV,
    LAYER_NORM,
    MEAN,
    MUL,
    Overloads,
    arguments,
    aten,
    is_call,
)
from pt2e_quant.graph.pattern import Lit, Match, Op, Pattern, Var, either_order, find_matches
from pt2e_quant.graph.rewrite import Rule, Skip

RMS_NORM: Overloads = (aten.rms_norm.default,)
"""torch's own; its weight may be None."""

FEATURE_NORMS = LAYER_NORM + RMS_NORM
"""Operators that normalize each sample over its last axes."""


def _roots(root: Overloads, x: Pattern) -> tuple[Op, ...]:
    """Root(mean(x ** 2) + eps), the square written as a power or as a product."""
    squares = Op(aten.pow.Tensor_Scalar, x, Lit(2)), Op(MUL, x, x)
    means = (Op(MEAN, square, Var("dims"), Lit(True)) for square in squares)
    return tuple(Op(root, Op(ADD, mean, Var("eps")), name="root") for mean in means)


_RECIPROCALS = _roots((aten.rsqrt.default,), Var("x"))
_SQUARE_ROOTS = _roots((aten.sqrt.default,), Var("x"))
_DEVIATIONS = tuple(
    Op((aten.rsqrt.default, aten.sqrt.default), Op(ADD, Op(var, Var("x")), Var("eps")), name="root")
    for var in (aten.var.correction, aten.var.dim)
)

NORMALIZED: tuple[Op, ...] = (
    *(op for root in _RECIPROCALS for op in either_order(MUL, Var("x"), root, name="rms")),
    *(Op(DIV, Var("x"), root, name="rms") for root in _SQUARE_ROOTS),
)
"""x * rsqrt(mean(x ** 2) + eps) and x / sqrt(mean(x ** 2) + eps)."""


def find_roots(graph: Graph) -> Mapping[Node, Node]:
    """Each root mean square, standard deviation or reciprocal of one, with the value it is of."""
    patterns = [("root", op) for op in (*_RECIPROCALS, *_SQUARE_ROOTS, *_DEVIATIONS)]
    return {match.anchor: match.node("x") for _, match in find_matches(graph, patterns)}


def is_normalized(node: Node, roots: Collection[Node]) -> bool:
    """True if a node multiplies by a reciprocal of `find_roots`, or divides by a root."""
    return is_call(node, MUL + DIV) and any(n in roots for n in node.all_input_nodes)


def _normalize(x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    """`x / sqrt(mean(x ** 2, dims) + eps)`, in the dtype of x."""
    return x * torch.rsqrt(x.pow(2).mean(list(dims), keepdim=True) + eps)


RmsNorm = define_composite("rms_norm(Tensor x, int[] dims, float eps) -> Tensor", _normalize)


def _build(m: Match, editor: Editor) -> Node | Skip:
    x, eps = m["x"], m["eps"]
    if not isinstance(eps, (int, float)):
        return Skip("eps is computed at run time")
    if m.anchor.meta["val"].dtype != x.meta["val"].dtype:
        return Skip("its mean is taken in another dtype")
    return editor.call(RmsNorm, x, list(m["dims"]), float(eps), like=m.anchor)


def _build_torch(m: Match, editor: Editor) -> Node | Skip:
    given = arguments(m.anchor)
    x, weight, eps = given["input"], given["weight"], given["eps"]
    dtype = x.meta["val"].dtype
    if dtype is not torch.float32:
        return Skip("torch computes it in float32")
    dims = list(range(-len(given["normalized_shape"]), 0))
    eps = torch.finfo(dtype).eps if eps is None else eps
    made = editor.call(RmsNorm, x, dims, float(eps), like=m.anchor)
    return made if weight is None else editor.call(aten.mul.Tensor, made, weight, like=m.anchor)


RMS_NORM_RULES = (
    Rule("a root mean square", NORMALIZED, _build),
    Rule("torch's root mean square", Op(RMS_NORM, Var("x")), _build_torch),
)
"""Both forms as `RmsNorm`, and the weight as a product behind it."""
