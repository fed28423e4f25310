"""Activations in int8 become uint8: the same integers, 128 more."""

import torch
from torch.fx import GraphModule

from pt2e_quant.graph.pipeline import PassResult, graph_pass
from pt2e_quant.passes.qdq.shift_activations import shift_activations


@graph_pass(needs=(), gives=())
def unsigned_activations(gm: GraphModule) -> PassResult:
    """Add 128 to every integer of an activation's int8, and to its zero point.

    For kernels that multiply uint8 by int8: oneDNN runs int8 by int8 in a reference loop, a
    thousand times slower, or refuses it.

    Before:  dequantize(quantize(x, s, z, -128, 127, int8), s, z, -128, 127, int8)
    After:   dequantize(quantize(x, s, z + 128, 0, 255, uint8), s, z + 128, 0, 255, uint8)
    """
    return shift_activations(gm, torch.int8)
