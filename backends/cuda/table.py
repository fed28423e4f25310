"""The op table of the CUDA backend: what this package's kernels run on an NVIDIA GPU."""

from pt2e_quant.graph.op_table import OpTable
from pt2e_quant.kernels.kernel import Device
from pt2e_quant.kernels.registry import Registry

_REASONS = {
    "aten.conv3d": "there is no int8 conv3d kernel",
    "aten.conv_transpose1d": "there is no int8 kernel for transposed convolutions",
    "aten.conv_transpose2d": "there is no int8 kernel for transposed convolutions",
    "aten.conv_transpose3d": "there is no int8 kernel for transposed convolutions",
    "aten.scaled_dot_product_attention": "torch's fused attention kernels are float",
}

REGISTRY = Registry.of(Device.CUDA)


def table_of(registry: Registry) -> OpTable:
    """The op table of a registry's kernels."""
    return registry.table("CUDA", _REASONS)


TABLE = table_of(REGISTRY)
