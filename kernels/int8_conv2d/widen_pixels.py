"""Convolutions of 3 channels read 4, so that a pixel is one load."""

from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import QuantizePerTensor
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.kernels.int8_conv2d.op import Int8Conv2d
from pt2e_quant.kernels.int8_conv2d.pack import fill_channels
from pt2e_quant.kernels.launch import ELEMENTS
from pt2e_quant.kernels.profiler_range import label_of
from pt2e_quant.kernels.quantize.op import QuantizePixels
from pt2e_quant.kernels.quantize.reference import PIXEL
from pt2e_quant.kernels.quantized_values import Affine, affine_of

_CHANNELS = 3
_WEIGHT = 3
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
    """Whether images of three channels are quantized to int8 from floats that a kernel reads."""
    source, made = quantize.args[0].meta["val"], quantize.meta["val"]  # type: ignore[union-attr]  # a node by schema
    if made.dim() != 4 or made.shape[1] != _CHANNELS or source.dtype not in ELEMENTS:
        return False
    return bool(source.dtype.is_floating_point and not made.dtype.is_floating_point)


def _takes_pixels(gm: GraphModule, quantize: Node, user: Node) -> bool:
    """Whether a reader is a convolution of all channels that reads the integers as its image."""
    if user.target is not Int8Conv2d or user.args[_GROUPS] != 1:
        return False
    others = (*user.args[1:], *user.kwargs.values())
    weight = user.args[_WEIGHT]
    is_constant = isinstance(weight, Node) and constant_of(gm, weight) is not None
    return is_constant and not any(other is quantize for other in others)


def _widen_weight(editor: Editor, conv: Node) -> None:
    held = conv.args[_WEIGHT]
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
