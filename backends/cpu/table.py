"""What oneDNN runs in integers from torch's own CPU build: the registry's entries as an op table.

Weights are int8 per output channel with zero_point 0, activations uint8: with int8 activations
oneDNN falls back to a reference loop, or refuses. Results are quantized where what reads them
is: no row has an output of its own except those that only move data.
"""

from pt2e_quant.graph.op_table import OpTable
from pt2e_quant.kernels.kernel import Device
from pt2e_quant.kernels.registry import Registry

__all__ = ["REGISTRY", "TABLE", "table_of"]

_REASONS = {
    "aten.conv3d": "oneDNN's int8 conv3d is in torch, but nothing here fuses it",
    "aten.conv_transpose1d": "torch has no integer transposed convolution of oneDNN",
    "aten.conv_transpose2d": "torch has no integer transposed convolution of oneDNN",
    "aten.conv_transpose3d": "torch has no integer transposed convolution of oneDNN",
    "aten.add": "an add that follows no convolution or linear is bound by memory in float too",
    "aten.mul": "a product of two tensors is bound by memory in float too",
    "aten.avg_pool2d": "torch has no integer average pooling of oneDNN",
    "aten.adaptive_avg_pool2d": "torch has no integer average pooling of oneDNN",
    "aten.mean": "torch has no integer mean of oneDNN",
    "aten.matmul": "oneDNN's int8 product of two run-time matrices is not in torch",
    "aten.bmm": "oneDNN's int8 product of two run-time matrices is not in torch",
    "aten.scaled_dot_product_attention": "torch's attention kernel for CPUs is float",
    "aten.layer_norm": "torch has no integer layer_norm",
    "aten.softmax": "torch has no integer softmax of oneDNN",
    "aten.embedding": "a look-up of float rows costs what the rows cost, not the table",
}

REGISTRY = Registry.of(Device.CPU)


def table_of(registry: Registry) -> OpTable:
    """The op table of a registry's kernels."""
    return registry.table("oneDNN", _REASONS)


TABLE = table_of(REGISTRY)
