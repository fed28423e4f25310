"""Export a converted graph again with the captured inputs and dynamic shapes."""

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from pt2e_quant.core.read_capture import capture_of

__all__ = ["export_again"]


def export_again(gm: GraphModule) -> ExportedProgram:
    """An ExportedProgram of a graph module whose dynamic dimensions are the captured ones.

    A plain re-export of a graph module specialises to the sample's shape; this one does not.
    """
    capture = capture_of(gm)
    args, kwargs = capture.example_inputs()
    with torch.no_grad():
        return torch.export.export(
            gm, args, kwargs, dynamic_shapes=capture.dynamic_shapes(), strict=False
        )
