"""The quantizes to 8-bit floats that no kernel took become one launch each."""

from torch.fx import GraphModule

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.kernels.launch import ELEMENTS
from pt2e_quant.kernels.profiler_range import label_of
from pt2e_quant.kernels.quantize.op import Quantize
from pt2e_quant.kernels.quantized_values import e4m3_of

__all__ = ["fuse_lone_e4m3"]


@graph_pass()
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
