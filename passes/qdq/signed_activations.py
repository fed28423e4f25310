"""Activations in uint8 become int8: the same integers, 128 less."""

import torch
from torch.fx import GraphModule

from pt2e_quant.graph.pipeline import PassResult, graph_pass
from pt2e_quant.passes.qdq.shift_activations import shift_activations


@graph_pass(needs=(), gives=())
def signed_activations(gm: GraphModule) -> PassResult:
    """Take 128 from every integer of an activation's uint8, and from its zero point.

    For kernels that multiply int8 by int8.

    Before:  dequantize(quantize(x, s, z, 0, 255, uint8), s, z, 0, 255, uint8)
    After:   dequantize(quantize(x, s, z - 128, -128, 127, int8), s, z - 128, -128, 127, int8)
    """
    return shift_activations(gm, torch.uint8)
