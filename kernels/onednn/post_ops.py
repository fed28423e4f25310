"""Activation functions as oneDNN takes them: the post-op's name, its numbers, its algorithm."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Node

from pt2e_quant.graph import ops
from pt2e_quant.graph.clamps import clamp_bounds
from pt2e_quant.graph.ops import Overloads, argument, is_call
from pt2e_quant.graph.pattern import one_of

CLIPS = one_of(ops.RELU6, ops.HARDTANH, ops.CLAMP)
"""Post-op "hardtanh"."""
CONV_POST_OPS = one_of(ops.RELU, CLIPS, ops.HARDSWISH, ops.SILU)


@dataclass(frozen=True, slots=True)
class PostOp:
    """A pointwise function on the float result, before it is quantized.

    Args:
        name: oneDNN's, "none" for nothing.
        scalars: its numbers.
        algorithm: of gelu, "none" (erf) or "tanh"; else "".
    """

    name: str
    scalars: tuple[float, ...] = ()
    algorithm: str = ""


NO_POST_OP = PostOp("none")


def _clamp(node: Node) -> PostOp:
    bounds = clamp_bounds(node)
    assert bounds is not None  # the op table asks for numbers
    return PostOp("hardtanh", bounds)


_READERS: tuple[tuple[Overloads, Callable[[Node], PostOp]], ...] = (
    (ops.RELU, lambda node: PostOp("relu")),
    (CLIPS, _clamp),
    (ops.HARDSWISH, lambda node: PostOp("hardswish")),
    (ops.SILU, lambda node: PostOp("swish")),
    (ops.GELU, lambda node: PostOp("gelu", (), str(argument(node, "approximate")))),
    (ops.LEAKY_RELU, lambda n: PostOp("leaky_relu", (float(argument(n, "negative_slope")),))),
    (ops.TANH, lambda node: PostOp("tanh")),
)


def post_op_of(node: Node) -> PostOp | None:
    """The post-op that computes what a node does, None if there is none."""
    return next((read(node) for overloads, read in _READERS if is_call(node, overloads)), None)


def limited(post_op: PostOp, high: float) -> PostOp | None:
    """The post-op with results of at most `high`, None where oneDNN has no such one.

    >>> limited(PostOp("relu"), 3.0)
    PostOp(name='hardtanh', scalars=(0.0, 3.0), algorithm='')
    """
    if post_op.name == "none":
        return PostOp("hardtanh", (-math.inf, high))
    if post_op.name == "relu":
        return PostOp("hardtanh", (0.0, high))
    if post_op.name == "hardtanh":
        return PostOp("hardtanh", (post_op.scalars[0], min(post_op.scalars[1], high)))
    return None
