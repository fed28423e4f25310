"""Registers every operator that a converted graph may hold, and the quantization primitives.

A program that `torch.export.save` wrote can then be read wherever this package is imported.
"""

from pt2e_quant.core import (
    cache_ops,
    primitives,
    qdq,
    recurrent_ops,
    snapshot_op,
    unpack_op,
)
from pt2e_quant.core.formats import format_ops
from pt2e_quant.core.integer_ops import norms, requantize, sums, tables, windows

__all__ = [
    "cache_ops",
    "format_ops",
    "norms",
    "primitives",
    "qdq",
    "recurrent_ops",
    "requantize",
    "snapshot_op",
    "sums",
    "tables",
    "unpack_op",
    "windows",
]
