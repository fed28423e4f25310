"""Export a converted graph again with the captured inputs and dynamic shapes."""

from functools import partial

import torch
from torch._dynamo.exc import UserError
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import aten


def export_again(gm: GraphModule) -> ExportedProgram:
    """An ExportedProgram of a graph module whose dynamic dimensions are the captured ones.

    A plain re-export of a graph module specialises to the sample's shape; this one does not.
    """
    capture = capture_of(gm)
    args, kwargs = capture.example_inputs()
    export = partial(torch.export.export, gm, args, kwargs, strict=False)
    with torch.no_grad():
        try:
            return export(dynamic_shapes=capture.dynamic_shapes())
        except (UserError, AssertionError):  # torch's text of the violation may fail to be made.
            pass
    # A size of 1 in the middle of the graph, or a size that is a multiple: known of the capture.
    with torch.no_grad():
        program = export(
            dynamic_shapes=capture.dynamic_shapes(),
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    graph = program.graph_module.graph
    editor = Editor(program.graph_module)
    editor.erase_dead([n for n in graph.nodes if n.target is aten._assert_scalar.default])
    editor.finish()
    return program
