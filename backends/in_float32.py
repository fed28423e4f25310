"""Graphs in half precision, of other Quantizers, for runtimes that compute in float32 alone."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.provenance import PROVENANCE_KEY, provenance_of
from pt2e_quant.core.qdq import is_dequantize, is_quantize
from pt2e_quant.graph.pipeline import log_passes, run_passes
from pt2e_quant.graph.subgraphs import copy_graph
from pt2e_quant.passes.cleanup.compute_in_float32 import compute_in_float32

__all__ = ["in_float32"]


def in_float32(gm: GraphModule) -> GraphModule:
    """The graph itself, or a copy in float32 if its q/dq take or give another float dtype.

    Runtimes stop the process at such q/dq. The copy's provenance says what was done.
    """
    if not any(_is_other_float(node) for node in gm.graph.nodes):
        return gm
    made = copy_graph(gm)
    table = provenance_of(gm)
    made.meta[PROVENANCE_KEY] = replace(table, notes=[*table.notes], passes=[*table.passes])
    log_passes(provenance_of(made), run_passes(made, (compute_in_float32((torch.float32,)),)))
    return made


def _is_other_float(node: Node) -> bool:
    """Whether a node is a q/dq whose real numbers are in another dtype than float32."""
    real = node.args[0] if is_quantize(node) else node if is_dequantize(node) else None
    value = real.meta.get("val") if isinstance(real, Node) else None
    return isinstance(value, Tensor) and value.dtype is not torch.float32
