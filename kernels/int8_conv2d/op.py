"""The operator `pt2e_quant::int8_conv2d`, where a graph calls it, and pixels widened to 4."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.granularity import PerChannel
from pt2e_quant.core.qdq import QuantizePerTensor
from pt2e_quant.core.schemes import INT8_ACTIVATION, TensorScheme
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import (
    ADDS_EQUAL_SHAPES,
    ADDS_UNSCALED,
    BATCHED_1D,
    BATCHED_2D,
    CONSTANT_BIAS,
    LIMITS_ARE_LITERALS,
)
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.op_table import Constraint
from pt2e_quant.graph.ops import CONV1D, Overloads, argument, aten, is_call
from pt2e_quant.graph.pattern import Match
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import EPILOGUE_SCHEMA
from pt2e_quant.kernels.epilogue.read_graph import ACTIVATIONS, epilogue_arguments
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.gemm_rows import gemm_rows
from pt2e_quant.kernels.int8_conv2d import reference
from pt2e_quant.kernels.int8_conv2d.pack import fill_channels, pack_weight, window_sums
from pt2e_quant.kernels.int8_conv2d.read_conv import (
    EVEN_PADDING,
    SUMS_FIT,
    even_padding,
    per_axis,
    weight_of,
)
from pt2e_quant.kernels.int8_conv2d.window import conv_sizes
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.launch import ELEMENTS
from pt2e_quant.kernels.profiler_range import label_of
from pt2e_quant.kernels.quantize.op import QuantizePixels
from pt2e_quant.kernels.quantize.reference import PIXEL
from pt2e_quant.kernels.quantized_values import Affine, affine_of, read_weight
from pt2e_quant.kernels.site import Site


def _fake(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sums: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    out_dtype: torch.dtype = torch.float32,
    **named: Any,
) -> Tensor:
    sizes = conv_sizes(x.shape, weight.shape, stride, padding, dilation, groups)
    shape = (sizes.batch, *sizes.out, sizes.outputs)
    return x.new_empty(shape, dtype=out_dtype).permute(0, 3, 1, 2)


Int8Conv2d = define(
    "int8_conv2d(Tensor x, Tensor x_scale, Tensor x_zero_point, Tensor weight, "
    "Tensor weight_scale, Tensor weight_sums, int[] stride, int[] padding, int[] dilation, "
    f"int groups, *, {EPILOGUE_SCHEMA}, "
    'str label="") -> Tensor',
    reference=reference.int8_conv2d,
    triton=triton_kernel("pt2e_quant.kernels.int8_conv2d.gpu", "int8_conv2d"),
    fake=_fake,
)
"""y = epilogue(convolution of (x - x_zero_point) with weight, times x_scale * weight_scale).

    x: int8[N, C, H, W], channels-last in memory (else it is copied first). Padding stands for
        0.0: it holds the zero point.
    x_scale, x_zero_point: float32[1] and int32[1].
    weight: as `pack.pack_weight` makes it; its zero point is 0.
    weight_scale: float32[O].
    weight_sums: int32[KH + 1, KW + 1, O], as `pack.window_sums` makes it.
    stride, padding, dilation: (along H, along W).
    groups: of channels.
    label: the node and layout, for the profiler.

The result is [N, O, OH, OW], channels-last in memory; so is a residual.
"""


def cost(x: Tensor, weight: Tensor, out: Tensor) -> Cost:
    """Bytes and operations of one call; a multiplication and an addition are two operations."""
    products = weight.numel() // out.shape[1]
    return Cost(
        bytes=moved_bytes(x, weight, out) + 8 * out.shape[1],
        operations=2 * out.numel() * products,
    )


_WEIGHT = TensorScheme(dtype=torch.int8, granularity=PerChannel(0), symmetric=True)


def _window(conv: Node) -> tuple[list[int], list[int], list[int], int]:
    """Stride, padding, dilation, each along H and W, and groups."""
    stride, dilation = per_axis(conv, "stride"), per_axis(conv, "dilation")
    padding = even_padding(conv)
    assert padding is not None  # a constraint of every row
    groups = int(argument(conv, "groups"))
    if len(padding) == 2:
        return stride, padding, dilation, groups
    return [1, *stride], [0, *padding], [1, *dilation], groups


def _image_shape(x: torch.Tensor) -> list[Any]:
    """[N, C, H, W], with a height of 1 for sequences."""
    return list(x.shape) if x.dim() == 4 else [*x.shape[:2], 1, *x.shape[2:]]


def shape_class(match: Match) -> str:
    """The row of the tile tables; "" if a size is symbolic."""
    conv = match.nodes["op"]
    shape = _image_shape(match.node("x").meta["val"])
    if not all(isinstance(size, int) for size in shape) or even_padding(conv) is None:
        return ""
    window = _window(conv)
    outputs, depth, *kernel = weight_of(conv).shape
    height, width = kernel if len(kernel) == 2 else (1, *kernel)
    is_depthwise = window[-1] > 1 and depth == 1
    packed = (height, width, outputs) if is_depthwise else (outputs, height, width, depth)
    return conv_sizes(shape, packed, *window).shape_class


def build(site: Site) -> Node:
    """`int8_conv2d` on the integers in front of the dequantizes; sequences as images of 1 row."""
    conv = site.match.nodes["op"]
    window = _window(conv)
    weight, affine = read_weight(site.gm, site.match["w"]), affine_of(site.match["x"])
    assert weight is not None  # the row's schemes say so
    assert affine is not None
    is_sequence = is_call(conv, CONV1D)
    integers = weight.integers.unsqueeze(2) if is_sequence else weight.integers
    named = epilogue_arguments(site)
    x = site.integers("x")
    if is_sequence:
        x = _as_image(site, x)
        if "residual" in named:
            named["residual"] = _as_image(site, named["residual"])
    made = _call(
        site,
        Int8Conv2d,
        (
            x,
            site.constant("x_scale", torch.tensor([affine.scale], dtype=torch.float32)),
            site.constant("x_zero_point", torch.tensor([affine.zero_point], dtype=torch.int32)),
            site.constant("weight_packed", pack_weight(integers, window[-1])),
            site.constant("weight_scale", weight.scale),
            site.constant("weight_sums", window_sums(integers)),
            *window,
        ),
        named,
    )
    return _call(site, aten.squeeze.dim, (made, 2), {}) if is_sequence else made


def _as_image(site: Site, value: Node) -> Node:
    return _call(site, aten.unsqueeze.default, (value, 2), {})


def _call(site: Site, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Node:
    """A call whose value is computed: it has the strides that the result will have."""
    return site.editor.call(target, *args, like=site.match.anchor, before=site.place, **kwargs)


def node_cost(node: Node) -> Cost:
    """The cost of a fused call in a graph, or of the squeeze behind one."""
    call = node if node.target is Int8Conv2d else node.all_input_nodes[0]
    x, weight = (call.args[i].meta["val"] for i in (0, 3))  # type: ignore[union-attr]  # nodes by construction
    return cost(x, weight, call.meta["val"])


_COMMON = (
    SUMS_FIT,
    EVEN_PADDING,
    LIMITS_ARE_LITERALS,
    CONSTANT_BIAS,
)
_OPERATORS: tuple[tuple[str, Overloads, Constraint], ...] = (
    ("conv1d", ops.CONV1D, BATCHED_1D),
    ("conv2d", ops.CONV2D, BATCHED_2D),
)

KERNELS = tuple(
    Kernel(
        row=row,
        device=Device.CUDA,
        op="int8_conv2d",
        build=build,
        shape_class=shape_class,
        cost=node_cost,
    )
    for name, overloads, batched in _OPERATORS
    for row in gemm_rows(
        name,
        overloads,
        x=(INT8_ACTIVATION,),
        w=(_WEIGHT,),
        activations=ACTIVATIONS,
        residual=(INT8_ACTIVATION,),
        constraints=(batched, *_COMMON),
        sum_constraints=(ADDS_UNSCALED, ADDS_EQUAL_SHAPES),
        lowers_to="pt2e_quant::int8_conv2d",
    )
)


_CHANNELS = 3
_WEIGHT_PLACE = 3
_GROUPS = 9
"""Places of `Int8Conv2d`'s arguments."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def widen_pixels(gm: GraphModule) -> PassResult:
    """Let the quantize in front of a convolution of 3 channels write a fourth, of zero points.

    Before:  q = quantize_per_tensor(x, s, z, …);  y = pt2e_quant.int8_conv2d(q, …, w, …)
    After:   q = pt2e_quant.quantize_pixels(x, …);  y = pt2e_quant.int8_conv2d(q, …, w0, …)
             where w0 has a channel of zeros: every sum is what it was.

    Three bytes a pixel have no address for a wider load than of a byte. To run behind what fuses
    convolutions, and before `fuse_lone_qdq`.
    """
    editor = Editor(gm)
    notes: list[Note] = []
    for node in list(gm.graph.nodes):
        affine = affine_of(node) if node.target is QuantizePerTensor else None
        if affine is None or not _is_of_three(node):
            continue
        if not all(_takes_pixels(gm, node, user) for user in node.users):
            text = "its pixels stay 3 bytes: others than plain convolutions read them"
            notes.append(Note(node.name, text, skipped=True))
            continue
        for conv in list(node.users):
            _widen_weight(editor, conv)
        editor.replace(node, _launch(editor, node, affine))
        notes.append(Note(node.name, "4 bytes a pixel"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _is_of_three(quantize: Node) -> bool:
    """True if images of three channels are quantized to int8 from floats that a kernel reads."""
    source, made = quantize.args[0].meta["val"], quantize.meta["val"]  # type: ignore[union-attr]  # a node by schema
    if made.dim() != 4 or made.shape[1] != _CHANNELS or source.dtype not in ELEMENTS:
        return False
    return bool(source.dtype.is_floating_point and not made.dtype.is_floating_point)


def _takes_pixels(gm: GraphModule, quantize: Node, user: Node) -> bool:
    """True if a reader is a convolution of all channels that reads the integers as its image."""
    if user.target is not Int8Conv2d or user.args[_GROUPS] != 1:
        return False
    others = (*user.args[1:], *user.kwargs.values())
    weight = user.args[_WEIGHT_PLACE]
    is_constant = isinstance(weight, Node) and constant_of(gm, weight) is not None
    return is_constant and not any(other is quantize for other in others)


def _widen_weight(editor: Editor, conv: Node) -> None:
    held = conv.args[_WEIGHT_PLACE]
    assert isinstance(held, Node)
    weight = constant_of(editor.gm, held)
    assert weight is not None  # _takes_pixels
    filled = editor.constant(f"{held.target}_filled", fill_channels(weight, PIXEL), like=conv)
    conv.replace_input_with(held, filled)
    editor.discard([held])


def _launch(editor: Editor, quantize: Node, affine: Affine) -> Node:
    return editor.call(
        QuantizePixels,
        quantize.args[0],
        out_scale=affine.scale,
        out_zero_point=affine.zero_point,
        out_min=affine.quant_min,
        out_max=affine.quant_max,
        label=label_of(quantize),
        like=quantize,
        before=quantize,
    )
