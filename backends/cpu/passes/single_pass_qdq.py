"""The q/dq that no operator took, in one pass over the data each."""

import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.kernels.quantized_values import affine_of

aten: Any = torch.ops.aten

FULL_RANGES = {torch.uint8: (0, 255, torch.quint8), torch.int8: (-128, 127, torch.qint8)}


def quantize_once(x: Tensor, scale: float, zero_point: int, dtype: torch.dtype) -> Tensor:
    """Quantize to all values of a dtype; strides are kept.

    Args:
        x: float32.
        scale: real units per integer step.
        zero_point: the integer of 0.0.
        dtype: uint8 or int8.
    """
    return integers_of(torch.quantize_per_tensor(x, scale, zero_point, FULL_RANGES[dtype][2]))


def integers_of(held: Tensor) -> Tensor:
    """The integers of one of torch's quantized tensors, where it has them.

    `int_repr` copies them one by one, which takes two to three times as long as quantizing.
    """
    dtype = torch.uint8 if held.dtype is torch.quint8 else torch.int8
    integers = torch.empty(0, dtype=dtype)
    return integers.set_(held.untyped_storage(), held.storage_offset(), held.shape, held.stride())


def dequantize_once(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """The float32 values that uint8 or int8 ones stand for; strides are kept."""
    return torch._make_per_tensor_quantized_tensor(x, scale, zero_point).dequantize()


@cache
def hear_deprecation() -> None:
    """Let torch say once what it says once a process: its quantized tensors are to go.

    Nothing a user can change; this package pins the torch versions that have them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dequantize_once(quantize_once(torch.zeros(1), 1.0, 0, torch.uint8), 1.0, 0)


@graph_pass(needs=(HAS_VALUES,), gives=())
def single_pass_qdq(gm: GraphModule) -> PassResult:
    """Spell the q/dq that are left with torch's own quantized tensors, one pass over the data.

    Before:  quantize_per_tensor(x, …)
    After:   quantize_once(x, …)

    The written-out form takes five passes. They differ where x / scale lies within float rounding
    of a half, in three values of a million, and on a half itself where the zero point is odd:
    torch's rounds to the even integer after it is added.
    """
    hear_deprecation()
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        affine = affine_of(node)
        if affine is None or affine.dtype not in FULL_RANGES or not _is_plain(node):
            continue
        source: Any = node.args[0]
        place: dict[str, Any] = {"like": node, "before": node, "val": node.meta["val"]}
        qparams = affine.scale, affine.zero_point
        if node.target is QuantizePerTensor:
            made = editor.call(quantize_once, source, *qparams, affine.dtype, **place)
            limits = affine.quant_min, affine.quant_max
            if limits != FULL_RANGES[affine.dtype][:2]:
                made = editor.call(aten.clamp.default, made, *limits, **place)
        else:
            made = editor.call(dequantize_once, source, *qparams, **place)
        editor.replace(node, made)
        notes.append(Note(node.name, "one pass"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _is_plain(node: Node) -> bool:
    """True if the float side is float32, which torch's quantized tensors need."""
    source: Any = node.args[0] if node.target is QuantizePerTensor else node
    is_known = node.target in (QuantizePerTensor, DequantizePerTensor)
    return is_known and source.meta["val"].dtype is torch.float32
