"""The op table of the CPU backend: what oneDNN in torch's own CPU build runs in integers.

Weights are int8 per output channel with zero_point 0, activations uint8: with int8 activations
oneDNN falls back to a reference loop, or refuses. Results are quantized where what reads them
is: no entry has an output of its own except those that only move data.
"""

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.schemes import Role
from pt2e_quant.graph.op_table import OpTable, Slot
from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.quantized_values import affine_of, read_weight, requantized
from pt2e_quant.kernels.read_scheme import scheme_of, slots_fit
from pt2e_quant.kernels.registry import Registry

_REASONS = {
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


def decide(gm: GraphModule, refused: dict[str, str]) -> Callable[[Kernel, Match], bool]:
    """A predicate for the matcher; why a match that fits is left goes to `refused`, by node."""
    return lambda kernel, match: _fits(gm, kernel, match, refused)


def _fits(gm: GraphModule, kernel: Kernel, match: Match, refused: dict[str, str]) -> bool:
    """True if a kernel takes a match; why one whose q/dq fit is left goes to `refused`.

    Ranges narrower than the entry's, or of weights that use -128, are taken: what a foreign
    quantizer wrote runs too.
    """
    row = kernel.row
    takes_floats = any(slot.role is Role.INPUT and not slot.accepts for slot in row.slots)
    if takes_floats and not slots_fit(gm, row, match):
        return False
    if not takes_floats and not all(_slot_fits(gm, match, slot) for slot in row.slots):
        return False
    broken = row.refusal(match)
    if broken is not None:
        refused.setdefault(match.anchor.name, f"{kernel.op} needs {broken.text}")
    return broken is None


def _slot_fits(gm: GraphModule, match: Match, slot: Slot) -> bool:
    at, role = slot.at, slot.role
    if any(accepted.is_dynamic for accepted in slot.accepts):
        found = scheme_of(gm, match[at])
        return found is not None and any(found.fits(accepted) for accepted in slot.accepts)
    if role is Role.WEIGHT:
        return match[at] is None or read_weight(gm, match[at]) is not None
    if role is Role.OUTPUT:
        written = requantized(match.anchor)
        return written is not None and written[0].dtype is torch.uint8
    if at == "y":  # a summand may be float
        return isinstance(match[at], Node)
    value = match[at]
    sources = value if isinstance(value, tuple) else (value,)
    affines = [affine_of(source) for source in sources]
    return all(affine is not None and affine.dtype is torch.uint8 for affine in affines)
