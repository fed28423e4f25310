"""The parts of a fused oneDNN call, read from a match."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from pt2e_quant.graph.meta import fake_cast
from pt2e_quant.graph.ops import CONV1D, CONV3D, is_call
from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.onednn.operators import ConvSum, QConv, image_format
from pt2e_quant.kernels.onednn.post_ops import NO_POST_OP, PostOp, limited, post_op_of
from pt2e_quant.kernels.onednn.speed import SHAPE_CLASS_KEY
from pt2e_quant.kernels.quantized_values import Affine, PackedSource, affine_of, read_weight
from pt2e_quant.kernels.site import Site

aten: Any = torch.ops.aten
FLOAT = Affine(1.0, 0, 0, 0, torch.float32)
"""The qparams that oneDNN takes for a float result or summand."""
_FULL_MAX = 255
_CHANNELS_LAST = (QConv, ConvSum, torch.ops.quantized.max_pool2d.default)
"""Their results are in this order already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The operands of a fused call.

    Args:
        x: uint8 activations.
        affine: their qparams.
        weight: int8 per output channel.
        bias: its node, or None.
        added: the other summand as the pattern has it: float, or a dequantize.
    """

    x: Node
    affine: Affine
    weight: PackedSource
    bias: Node | None
    added: Node | None


def read_operands(site: Site) -> Operands:
    """The operands of a match whose q/dq `fits` has looked at."""
    affine = affine_of(site.match["x"])
    weight = read_weight(site.gm, site.match["w"])
    assert affine is not None
    assert weight is not None
    bias = site.match.values.get("b")
    return Operands(
        x=site.integers("x"),
        affine=affine,
        weight=weight,
        bias=site.editor.now(bias) if isinstance(bias, Node) else None,
        added=site.editor.now(site.match.node("y")) if "add" in site.match.nodes else None,
    )


@dataclass(frozen=True, slots=True)
class Result:
    """The epilogue of a fused call.

    Args:
        affine: qparams of the result, `FLOAT` for a float one.
        post_op: the activation function.
        limit: what integers are clamped to afterwards; None where the post-op keeps them below.
    """

    affine: Affine
    post_op: PostOp
    limit: int | None

    @classmethod
    def of(cls, site: Site) -> "Result":
        """The ending of a match. oneDNN saturates at 255: less is kept by the post-op, or after.

        Sums, and convolutions of one and three dimensions, have no post-op that clips.
        """
        is_sum = "add" in site.match.nodes
        post_op = _post_op(site.match, is_sum)
        output = site.output
        if output is None or output.dtype is not torch.uint8:
            return cls(FLOAT, post_op, None)
        if output.quant_max >= _FULL_MAX:
            return cls(output, post_op, None)
        high = (output.quant_max - output.zero_point) * output.scale
        has_clips = not is_sum and not is_call(site.match.nodes["op"], CONV1D + CONV3D)
        narrowed = limited(post_op, high) if has_clips else None
        if narrowed is None:
            return cls(output, post_op, output.quant_max)
        return cls(output, narrowed, None)

    @property
    def is_float(self) -> bool:
        """True if the call gives float32."""
        return self.affine.dtype is torch.float32

    @property
    def described(self) -> tuple[float, int, torch.dtype]:
        """Scale, zero point and dtype, in oneDNN's order."""
        return self.affine.scale, self.affine.zero_point, self.affine.dtype

    @property
    def unary(self) -> tuple[str, list[float], str]:
        """The post-op, in oneDNN's order.

        A function without numbers gets one that it does not read: torch.export.save knows no
        empty lists of numbers.
        """
        return self.post_op.name, list(self.post_op.scalars) or [0.0], self.post_op.algorithm


def _post_op(match: Match, is_sum: bool) -> PostOp:
    last_product = match.nodes["add"] if is_sum else match.nodes["op"]
    if match.anchor is last_product:
        return NO_POST_OP
    found = post_op_of(match.anchor)
    assert found is not None  # the row's pattern takes no others
    return found


def finish(
    site: Site, target: Any, args: tuple[Any, ...], result: Result, shape_class: str
) -> Node:
    """The call, marked with its class of sizes, and what clamps its result where oneDNN cannot."""
    value = fake_cast(site.match.anchor.meta["val"], result.affine.dtype)
    place: dict[str, Any] = {"like": site.match.anchor, "before": site.place, "val": value}
    node = site.editor.call(target, *args, **place)
    node.meta[SHAPE_CLASS_KEY] = shape_class
    if result.limit is not None:
        node = site.editor.call(aten.clamp_max.default, node, result.limit, **place)
    return node


def channels_last(site: Site, value: Node) -> Node:
    """An image in channels-last order, once for all that read it; nothing is copied that is so."""
    memory_format = image_format(value.meta["val"].dim())
    if memory_format is None or value.target in _CHANNELS_LAST:
        return value
    for reader in value.users:
        is_same = reader.kwargs.get("memory_format") is memory_format
        if reader.target is aten.contiguous.default and is_same and reader < site.place:
            return reader
    return site.editor.call(
        aten.contiguous.default,
        value,
        like=site.match.nodes["op"],
        before=site.place,
        val=value.meta["val"],
        memory_format=memory_format,
    )


def known_sizes(node: Node) -> list[int] | None:
    """The shape that packing is tuned for; None where a size is symbolic."""
    shape = node.meta["val"].shape
    return [int(size) for size in shape] if all(type(size) is int for size in shape) else None
