"""A copy of a graph module, with bodies of its own: what a lowering edits."""

import copy
import warnings
from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.graph.alias import subgraph_of
from pt2e_quant.graph.pipeline import GraphPass, Validation, run_passes

__all__ = ["copy_graph", "edited_copy"]


def copy_graph(gm: GraphModule) -> GraphModule:
    """A graph module with a graph of its own, and bodies of its own, that shares the tensors."""
    with warnings.catch_warnings():
        # torch 2.13 deprecates a class that its own pytrees are copied with.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        made = GraphModule(gm, copy.deepcopy(gm.graph))
    made.meta = dict(gm.meta)
    names = {str(n.target): body for n in gm.graph.nodes if (body := subgraph_of(n)) is not None}
    bodies = {body: copy_graph(body) for body in names.values()}
    for name, body in names.items():
        owner, _, leaf = name.rpartition(".")
        setattr(made.get_submodule(owner), leaf, bodies[body])
    return made


def edited_copy(
    gm: GraphModule, passes: Sequence[GraphPass], *, validation: Validation | None = None
) -> GraphModule:
    """A copy of a graph after passes; the graph is not changed.

    Constants are shared with it, but for buffers that a call writes: those are copied.
    """
    work = copy_graph(gm)
    for name in capture_of(gm).mutated_buffers:
        owner, _, leaf = name.rpartition(".")
        holder = work.get_submodule(owner)
        setattr(holder, leaf, getattr(holder, leaf).clone())
    with torch.no_grad():
        run_passes(work, passes, validation=validation)
    return work
