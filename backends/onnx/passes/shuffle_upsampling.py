"""Write transposed convolutions whose windows do not overlap as convolutions."""

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of, source_constant
from pt2e_quant.graph.ops import CONV_TRANSPOSE2D, arguments, aten, is_call
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass


@graph_pass(needs=(), gives=())
def shuffle_upsampling(gm: GraphModule) -> PassResult:
    """Write an upsampling conv_transpose2d as a 1x1 convolution and a pixel_shuffle.

    ONNX Runtime has no integer ConvTranspose, but runs these two in integers. With a kernel as
    large as the stride no two windows overlap, and each input pixel alone makes r x r outputs.

    Before:  conv_transpose2d(x, w[Ci, Co, r, r], b, stride=r)
    After:   pixel_shuffle(conv2d(x, w[Co * r * r, Ci, 1, 1], b[Co * r * r]), r)
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, CONV_TRANSPOSE2D)]:
        weight = _weight(gm, node)
        if weight is None or not _is_upsampling(node, weight):
            notes.append(Note(node.name, "its windows overlap, or are cut", skipped=True))
            continue
        editor.replace(node, _written_out(gm, editor, node, weight))
        notes.append(Note(node.name, "conv_transpose2d -> conv2d, pixel_shuffle"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _weight(gm: GraphModule, node: Node) -> Tensor | None:
    weight = node.args[1]
    return constant_of(gm, weight) if isinstance(weight, Node) else None


def _is_upsampling(node: Node, weight: Tensor) -> bool:
    found = arguments(node)
    kernel = list(weight.shape[2:])
    cuts = [*_list(found["padding"]), *_list(found["output_padding"])]
    return (
        kernel[0] == kernel[1]
        and all(s == kernel[0] for s in _list(found["stride"]))
        and not any(cuts)
        and all(d == 1 for d in _list(found["dilation"]))
        and found["groups"] == 1
    )


def _written_out(gm: GraphModule, editor: Editor, node: Node, weight: Tensor) -> Node:
    factor = int(weight.shape[2])
    flat = weight.permute(1, 2, 3, 0).reshape(-1, weight.shape[0], 1, 1).contiguous()
    x, stored = node.args[0], node.args[1]
    assert isinstance(stored, Node)
    constants = [editor.constant(f"{_name(stored)}_shuffled", flat, like=stored)]
    bias_node = arguments(node)["bias"]
    bias = constant_of(gm, bias_node) if isinstance(bias_node, Node) else None
    if bias is not None:
        each = bias.repeat_interleave(factor * factor)
        constants.append(editor.constant(f"{_name(bias_node)}_shuffled", each, like=bias_node))
    made = editor.call(aten.conv2d.default, x, *constants, like=node, before=node)
    return editor.call(aten.pixel_shuffle.default, made, factor, like=node, before=node)


def _name(node: Node) -> str:
    source = source_constant(node)
    return node.name if source is None else str(source.target)


def _list(value: int | list[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)
