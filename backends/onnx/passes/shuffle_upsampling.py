"""Transposed convolutions as integer convolutions, of which ONNX Runtime has kernels."""

from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.speed_classes import ratio_here
from pt2e_quant.graph.op_table import ALLOWED_KEY, SLOWER
from pt2e_quant.passes.cleanup import transposed_convolutions


def _reason_against(gm: GraphModule, node: Node) -> str:
    """The ratio that the class of its sizes measured, where float is faster."""
    measured = ratio_here(node, "onnx")
    if measured is None or measured >= 1 or SLOWER in gm.meta.get(ALLOWED_KEY, ()):
        return ""
    return (
        f"as an integer convolution it measured {measured:.2f} times as fast as float; "
        f'quantizer.allowing("{SLOWER}") has it so'
    )


shuffle_upsampling = transposed_convolutions.shuffle_upsampling(_reason_against)
"""ONNX Runtime has no integer ConvTranspose, but runs convolutions and moves data in integers."""
