"""A copy of a graph module, with bodies of its own: what a lowering edits."""

from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.graph.pipeline import GraphPass, Validation, run_passes
from pt2e_quant.graph.subgraphs import copy_graph, direct_bodies
from pt2e_quant.passes.cleanup.sink_constants import sink_constants
from pt2e_quant.passes.weights.unpack_inside import unpack_inside


def edited_copy(
    gm: GraphModule, passes: Sequence[GraphPass], *, validation: Validation | None = None
) -> GraphModule:
    """A copy of a graph after passes; the graph is not changed.

    Constants are shared with it, but for buffers that a call writes: those are copied. Bodies of
    control flow go through the passes first, each with its weights as constants of its own; they
    keep them so (`lift_constants` makes them operands again, as torch.export wants them).
    """
    work = copy_graph(gm)
    for name in capture_of(gm).mutated_buffers:
        owner, _, leaf = name.rpartition(".")
        holder = work.get_submodule(owner)
        setattr(holder, leaf, getattr(holder, leaf).clone())
    with torch.no_grad():
        if direct_bodies(work):
            run_passes(work, (unpack_inside, sink_constants))
        for body in direct_bodies(work):
            _edit(body.gm, passes)
        run_passes(work, passes, validation=validation)
    return work


def _edit(gm: GraphModule, passes: Sequence[GraphPass]) -> None:
    for body in direct_bodies(gm):
        _edit(body.gm, passes)
    run_passes(gm, passes)
