"""One call of a fused oneDNN operator from what was read off the graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.backends.cpu.post_ops import PostOp, limited
from pt2e_quant.kernels.quantized_values import Affine, PackedSource, affine_of
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import fake_cast
from pt2e_quant.graph.ops import VIEWS, argument, is_call

__all__ = ["Build", "Made", "Site", "build_conv", "build_linear"]

_onednn: Any = torch.ops.onednn
aten: Any = torch.ops.aten
CONVOLUTIONS = (_onednn.qconv_pointwise.default, _onednn.qconv2d_pointwise.binary)
"""They give channels-last results."""
FUSED = (*CONVOLUTIONS, _onednn.qlinear_pointwise.default, _onednn.qlinear_pointwise.binary)
_FULL_MAX = 255
_FLOAT = Affine(1.0, 0, 0, 0, torch.float32)
"""What oneDNN wants to hear of a float result or summand."""


@dataclass(frozen=True, slots=True)
class Build:
    """One run of the pass.

    Args:
        editor: where calls go.
        order: the position of each node of the graph as it was.
        runs_at: position of the fused call, for each operator that will be part of one.
    """

    editor: Editor
    order: Mapping[Node, int]
    runs_at: Mapping[Node, int]

    def last_read(self, reader: Node) -> int:
        """When a reader of integers and what reads it have run; -1 for calls of this run."""
        nodes = (reader, *reader.users)
        return max(self.runs_at.get(node, self.order.get(node, -1)) for node in nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One operator to fuse.

    Args:
        op: the convolution or linear.
        anchor: the last operator that is fused.
        place: the node before which the fused call goes.
        x: uint8 activations.
        affine: their qparams.
        weight: what to pack.
        bias: its node, or None.
        padding: of a convolution, in numbers.
        post_op: the activation function.
        added: the other summand of a residual sum.
        output: qparams of the result with the quantizes that read it; None for float.
    """

    op: Node
    anchor: Node
    place: Node
    x: Node
    affine: Affine
    weight: PackedSource
    bias: Node | None
    padding: tuple[int, ...]
    post_op: PostOp
    added: Node | None
    output: tuple[Affine, list[Node]] | None


@dataclass(frozen=True, slots=True)
class Made:
    """The result, and the nodes whose place it takes."""

    node: Node
    replaces: list[Node]


def build_conv(build: Build, site: Site) -> Made:
    """A convolution; activations and results in channels-last order."""
    stride, dilation = _pairs(site, "stride"), _pairs(site, "dilation")
    groups = argument(site.op, "groups")
    geometry = (stride, list(site.padding), dilation, groups)
    packed = _onednn.qconv_prepack(
        site.weight.integers,
        site.weight.scale,
        site.affine.scale,
        site.affine.zero_point,
        *geometry,
        _sizes(site.x),
    )
    head = _head(build, site, _channels_last(build, site, site.x), packed)
    if site.added is None:
        return _finished(
            build, site, _onednn.qconv_pointwise.default, (*head, site.bias, *geometry)
        )
    return _summed_conv(build, site, head, geometry)


def build_linear(build: Build, site: Site) -> Made:
    """A linear; what is added stays float and is not written."""
    x = site.x
    if x.target not in FUSED:
        x = build.editor.call(
            aten.contiguous.default, x, like=site.op, before=site.place, val=x.meta["val"]
        )
    packed = _onednn.qlinear_prepack(site.weight.integers, _sizes(site.x))
    head = _head(build, site, x, packed)
    if site.added is None:
        return _finished(build, site, _onednn.qlinear_pointwise.default, (*head, site.bias))
    output, post_op, clamp = _result(site, can_limit=False)
    node = _call(
        build,
        site,
        _onednn.qlinear_pointwise.binary,
        (*head, site.added, site.bias, *_described(output)),
        (1.0, 0, "add", 1.0, post_op.name, list(post_op.scalars), post_op.algorithm),
        output,
    )
    return _clamped(build, site, node, clamp)


def _summed_conv(
    build: Build, site: Site, head: tuple[Any, ...], geometry: tuple[Any, ...]
) -> Made:
    """A convolution that adds into its other summand: in integers if that and the result are."""
    added = site.added
    assert added is not None
    affine = affine_of(added)
    in_integers = site.output is not None and affine is not None and affine.dtype is torch.uint8
    in_integers = in_integers and site.output is not None and site.output[0].dtype is torch.uint8
    source: Any = added.args[0] if in_integers else added
    summand = affine if in_integers and affine is not None else _FLOAT
    accumulator = _own(build, site, _channels_last(build, site, source), source)
    output, post_op, clamp = _result(site, can_limit=False)
    if not in_integers:
        output = _FLOAT
    node = _call(
        build,
        site,
        _onednn.qconv2d_pointwise.binary,
        (*head, accumulator, site.bias, *geometry, *_described(output)),
        (
            summand.scale,
            summand.zero_point,
            "sum",
            1.0,
            post_op.name,
            list(post_op.scalars),
            post_op.algorithm,
        ),
        output,
    )
    if not in_integers:
        return Made(node, [site.anchor])
    return _clamped(build, site, node, clamp)


def _own(build: Build, site: Site, value: Node, source: Node) -> Node:
    """A tensor that may be written: `value`, or a copy where its storage is read elsewhere.

    oneDNN's "sum" writes into its summand. That is harmless only where an operator allocated it
    and all else that reads it has run before. Calls that this pass made stand before this one.
    """
    here = build.order[site.place]
    readers = [u for u in source.users if u is not site.added and u is not value]
    has_run = all(build.last_read(u) < here for u in readers)
    # A view of it may be read later, once what moves data does so in integers.
    is_viewed = any(is_call(user, VIEWS) for u in readers for user in (u, *u.users))
    if has_run and not is_viewed and _is_fresh(source) and source is not site.x:
        return value
    return build.editor.call(
        aten.clone.default, value, like=site.op, before=site.place, val=value.meta["val"]
    )


def _is_fresh(source: Node) -> bool:
    """Whether a node's result has storage of its own, also after the passes that follow."""
    if source.target in (QuantizePerTensor, DequantizePerTensor):
        inner = source.args[0]
        return isinstance(inner, Node) and not is_call(inner, VIEWS)
    return source.op == "call_function" and source.target in FUSED


def _head(build: Build, site: Site, x: Node, packed: Tensor) -> tuple[Any, ...]:
    """x, its qparams, the packed weight, its scales and zero points."""
    scale = site.weight.scale
    zeros = torch.zeros(scale.shape, dtype=torch.int32)
    return (
        x,
        site.affine.scale,
        site.affine.zero_point,
        _packed_constant(build, site, packed),
        build.editor.constant(f"{site.op.name}.scale", scale, like=site.op),
        build.editor.constant(f"{site.op.name}.zero_point", zeros, like=site.op),
    )


def _packed_constant(build: Build, site: Site, packed: Tensor) -> Node:
    """An attribute with a packed weight: opaque, so that it carries the integers' fake value."""
    name = build.editor.unique_name(f"packed_{site.op.name}")
    build.editor.gm.register_buffer(name, packed, persistent=False)
    with build.editor.graph.inserting_before(site.place):
        node = build.editor.graph.create_node("get_attr", name)
    weight: Any = site.op.args[1]
    node.meta["val"] = weight.meta["val"]
    return node


def _finished(build: Build, site: Site, target: Any, args: tuple[Any, ...]) -> Made:
    output, post_op, clamp = _result(site, can_limit=True)
    end = (post_op.name, list(post_op.scalars), post_op.algorithm)
    node = _call(build, site, target, (*args, *_described(output)), end, output)
    return _clamped(build, site, node, clamp)


def _result(site: Site, *, can_limit: bool) -> tuple[Affine, PostOp, int | None]:
    """(qparams of the result, post-op, limit to clamp the integers to afterwards).

    oneDNN saturates at 255; a narrower range is kept by the post-op where it can.
    """
    if site.output is None or site.output[0].dtype is not torch.uint8:
        return _FLOAT, site.post_op, None
    output = site.output[0]
    if output.quant_max >= _FULL_MAX:
        return output, site.post_op, None
    high = (output.quant_max - output.zero_point) * output.scale
    narrowed = limited(site.post_op, high) if can_limit else None
    return (
        (output, site.post_op, output.quant_max) if narrowed is None else (output, narrowed, None)
    )


def _clamped(build: Build, site: Site, node: Node, limit: int | None) -> Made:
    if limit is not None:
        node = build.editor.call(
            aten.clamp_max.default,
            node,
            limit,
            like=site.anchor,
            before=site.place,
            val=node.meta["val"],
        )
    is_float = site.output is None or site.output[0].dtype is not torch.uint8
    return Made(node, [site.anchor] if is_float or site.output is None else site.output[1])


def _call(
    build: Build,
    site: Site,
    target: Any,
    args: tuple[Any, ...],
    end: tuple[Any, ...],
    output: Affine,
) -> Node:
    value = fake_cast(site.anchor.meta["val"], output.dtype)
    return build.editor.call(target, *args, *end, like=site.anchor, before=site.place, val=value)


def _described(output: Affine) -> tuple[float, int, torch.dtype]:
    return output.scale, output.zero_point, output.dtype


def _channels_last(build: Build, site: Site, value: Node) -> Node:
    """The value in channels-last order: nothing is copied where it has that already."""
    if value.meta["val"].dim() != 4 or value.target in CONVOLUTIONS:
        return value
    return build.editor.call(
        aten.contiguous.default,
        value,
        like=site.op,
        before=site.place,
        val=value.meta["val"],
        memory_format=torch.channels_last,
    )


def _pairs(site: Site, name: str) -> list[int]:
    """Stride or dilation with a number for each spatial axis."""
    given = list(argument(site.op, name))
    weight: Any = site.op.args[1]
    axes = weight.meta["val"].dim() - 2
    return given * axes if len(given) == 1 else given


def _sizes(x: Node) -> list[int] | None:
    """The shape that packing is tuned for; None where a size is symbolic."""
    shape = x.meta["val"].shape
    return [int(size) for size in shape] if all(type(size) is int for size in shape) else None
