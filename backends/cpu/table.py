"""The op table of the CPU backend: what oneDNN in torch's own CPU build runs in integers.

Weights are int8 per output channel with zero_point 0, activations uint8: with int8 activations
oneDNN falls back to a reference loop, or refuses. Results are quantized where what reads them
is: no row has an output of its own except those that only move data.
"""

from pt2e_quant.graph.op_table import OpTable
from pt2e_quant.kernels.kernel import Device
from pt2e_quant.kernels.registry import Registry

_REASONS = {
    "aten.conv3d": "oneDNN's int8 conv3d is in torch, but nothing here fuses it",
    "aten.conv_transpose1d": "torch has no integer transposed convolution of oneDNN",
    "aten.conv_transpose2d": "torch has no integer transposed convolution of oneDNN",
    "aten.conv_transpose3d": "torch has no integer transposed convolution of oneDNN",
    "aten.add": "alone: torch's sum of quantized tensors measured slower than float's and a "
    "quantize below 2^17 elements, and oneDNN's is wrong above 127",
    "aten.mul": "torch's product of quantized tensors measured slower than float's and a quantize "
    "below 2^17 elements and by a gate of any size, and oneDNN's is wrong above 127",
    "aten.avg_pool2d": "torch's average of quantized windows measured no faster than float's and "
    "a quantize, and rounds to the scale of what goes in",
    "aten.adaptive_avg_pool2d": "torch's average of a quantized image measured no faster than "
    "float's and a quantize, and rounds to the scale of what goes in",
    "aten.mean": "torch's mean of a quantized image takes longer than float's and a quantize",
    "aten.hardswish": "alone: torch's on quantized tensors measured as fast as float's and a "
    "quantize",
    "aten.sigmoid": "alone: torch's on quantized tensors measured slower than float's and a "
    "quantize",
    "aten.matmul": "oneDNN's int8 product of two run-time matrices is not in torch",
    "aten.bmm": "oneDNN's int8 product of two run-time matrices is not in torch",
    "aten.scaled_dot_product_attention": "torch's attention kernel for CPUs is float",
    "aten.layer_norm": "torch has no integer layer_norm",
    "aten.softmax": "torch has no integer softmax of oneDNN",
    "aten.embedding": "rows of integers take longer to look up and dequantize than float rows",
}

REGISTRY = Registry.of(Device.CPU)


def table_of(registry: Registry) -> OpTable:
    """The op table of a registry's kernels."""
    return registry.table("oneDNN", _REASONS)


TABLE = table_of(REGISTRY)
