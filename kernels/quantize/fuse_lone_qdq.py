"""The quantizes and dequantizes that no kernel took become one launch each."""

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import QuantizePerTensor
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.kernels.epilogue.epilogue import INTEGER_OUTPUTS
from pt2e_quant.kernels.launch import ELEMENTS
from pt2e_quant.kernels.profiler_range import label_of
from pt2e_quant.kernels.quantize.op import Quantize
from pt2e_quant.kernels.quantized_values import Affine, affine_of, e4m3_of


@graph_pass(needs=(HAS_VALUES,), gives=())
def fuse_lone_qdq(gm: GraphModule) -> PassResult:
    """Replace every static per-tensor quantize and dequantize by `pt2e_quant::quantize`.

    Before:  quantize_per_tensor(x, s, z, -128, 127, int8)
    After:   pt2e_quant.quantize(x, out_dtype=int8, out_scale=s, out_zero_point=z, …)

    To run after everything that looks for q/dq. torch's own operators are five launches a
    quantize and three a dequantize.
    """
    editor = Editor(gm)
    notes: list[Note] = []
    for node in list(gm.graph.nodes):
        affine = affine_of(node)
        if affine is None or affine.dtype not in INTEGER_OUTPUTS:
            continue
        editor.replace(node, _launch(editor, node, affine))
        notes.append(Note(node.name, "one launch"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _launch(editor: Editor, node: Node, affine: Affine) -> Node:
    value: Tensor = node.meta["val"]
    named: dict[str, Any] = {"label": label_of(node)}
    if node.target is QuantizePerTensor:
        named |= {
            "out_dtype": affine.dtype,
            "out_scale": affine.scale,
            "out_zero_point": affine.zero_point,
            "out_min": affine.quant_min,
            "out_max": affine.quant_max,
        }
    else:
        named |= {
            "x_scale": affine.scale,
            "x_zero_point": affine.zero_point,
            "out_dtype": value.dtype,
        }
    return editor.call(Quantize, node.args[0], like=node, before=node, val=value, **named)


@graph_pass(needs=(HAS_VALUES,), gives=())
def fuse_lone_e4m3(gm: GraphModule) -> PassResult:
    """Replace every quantize of a whole tensor by a constant scale by `pt2e_quant::quantize`.

    Before:  quantize_float(x, s, None, [-1, -1], "float8_e4m3fn")
    After:   pt2e_quant.quantize(x, out_dtype=float8_e4m3fn, out_scale=s)

    To run after everything that looks for q/dq. torch's own operators are four launches.
    """
    editor = Editor(gm)
    notes: list[Note] = []
    for node in list(gm.graph.nodes):
        found = e4m3_of(node)
        if found is None or node.args[0].meta["val"].dtype not in ELEMENTS:
            continue
        made = editor.call(
            Quantize,
            node.args[0],
            out_dtype=found.dtype,
            out_scale=found.scale,
            label=label_of(node),
            like=node,
            before=node,
            val=node.meta["val"],
        )
        editor.replace(node, made)
        notes.append(Note(node.name, "one launch"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))
