"""A copy of a graph module after passes: what a lowering that ends in a torch module works on."""

import copy
import warnings
from collections.abc import Sequence

import torch
from torch.fx import GraphModule

from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.graph.pipeline import GraphPass, run_passes

__all__ = ["edited_copy"]


def edited_copy(gm: GraphModule, passes: Sequence[GraphPass]) -> GraphModule:
    """A copy of a graph after passes; the graph is not changed.

    Constants are shared with it, but for buffers that a call writes: those are copied.
    """
    with warnings.catch_warnings():
        # torch 2.13 deprecates a class that its own pytrees are copied with.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        work = GraphModule(gm, copy.deepcopy(gm.graph))
    work.meta = dict(gm.meta)
    for name in capture_of(gm).mutated_buffers:
        owner, _, leaf = name.rpartition(".")
        holder = work.get_submodule(owner)
        setattr(holder, leaf, getattr(holder, leaf).clone())
    with torch.no_grad():
        run_passes(work, passes)
    return work
