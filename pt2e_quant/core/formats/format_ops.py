"""The q/dq operators that quantized_decomposed has no name for, in the library `pt2e_quant`.

- `quantize_block`, `dequantize_block`: integers with a scale for each block of any shape, in any
  float dtype: groups of a convolution's weight, squares of 128, float16 or power-of-two scales.
- `quantize_float`, `dequantize_float`: the small floats of `core.number_formats`. A block's scale
  may be in units of a tensor's scale (NVFP4).
- `quantize_codebook`, `dequantize_codebook`: places in a table of real values, one table for all
  blocks or one for each.
- `choose_scales`: the scales of a tensor at run time, from the greatest magnitude of each block.

`block_size` is as in `core.blocks`. All are plain torch: `DECOMPOSITIONS` writes any of them out
in ATen operators with `ExportedProgram.run_decompositions`, with the same result to the last bit.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.formats.blocks import grid_shape
from pt2e_quant.core.formats.code_books import check_table
from pt2e_quant.core.formats.format_arithmetic import (
    check_scales,
    choose_scales,
    dequantize_block,
    dequantize_codebook,
    dequantize_float,
    quantize_block,
    quantize_codebook,
    quantize_float,
)
from pt2e_quant.core.formats.number_formats import float_format

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own

_SCHEMAS = (
    "quantize_block(Tensor input, Tensor scales, Tensor? zero_points, int[] block_size, "
    "int quant_min, int quant_max, ScalarType dtype) -> Tensor",
    "dequantize_block(Tensor input, Tensor scales, Tensor? zero_points, int[] block_size, "
    "int quant_min, int quant_max, ScalarType dtype, *, ScalarType? out_dtype=None) -> Tensor",
    "quantize_float(Tensor input, Tensor scales, Tensor? tensor_scale, int[] block_size, "
    "str format) -> Tensor",
    "dequantize_float(Tensor input, Tensor scales, Tensor? tensor_scale, int[] block_size, "
    "str format, *, ScalarType? out_dtype=None) -> Tensor",
    "quantize_codebook(Tensor input, Tensor table, Tensor? scales, int[] block_size) -> Tensor",
    "dequantize_codebook(Tensor input, Tensor table, Tensor? scales, int[] block_size, "
    "*, ScalarType? out_dtype=None) -> Tensor",
    "choose_scales(Tensor input, Tensor? tensor_scale, int[] block_size, float limit, "
    "ScalarType dtype) -> Tensor",
)


def _like(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype or torch.float32)


def _fake_quantize_block(
    x: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    block_size: Sequence[int],
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> Tensor:
    check_scales(scales, x, block_size)
    return _like(x, dtype)


def _fake_dequantize_block(
    codes: Tensor,
    scales: Tensor,
    zero_points: Any,
    block_size: Sequence[int],
    *_: Any,
    **named: Any,
) -> Tensor:
    check_scales(scales, codes, block_size)
    return _like(codes, named.get("out_dtype"))


def _fake_quantize_float(
    x: Tensor, scales: Tensor, tensor_scale: Any, block_size: Sequence[int], format: str
) -> Tensor:
    check_scales(scales, x, block_size)
    return _like(x, float_format(format).storage)


def _fake_codebook(
    codes: Tensor, table: Tensor, scales: Tensor | None, block_size: Sequence[int]
) -> Tensor:
    check_table(codes.shape, table, block_size)
    if scales is not None:
        check_scales(scales, codes, block_size)
    return _like(codes, torch.uint8)


def _fake_dequantize_codebook(
    codes: Tensor, table: Tensor, scales: Tensor | None, block_size: Sequence[int], **named: Any
) -> Tensor:
    return _like(_fake_codebook(codes, table, scales, block_size), named.get("out_dtype"))


def _fake_choose_scales(
    x: Tensor, tensor_scale: Any, block_size: Sequence[int], limit: float, dtype: torch.dtype
) -> Tensor:
    return x.new_empty(grid_shape(x.shape, block_size), dtype=dtype)


def _contiguous(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel whose result has the layout of the fake kernel's, whatever the input's is."""

    @wraps(run)
    def laid_out(*args: Any, **named: Any) -> Tensor:
        return run(*args, **named).contiguous()

    return laid_out


_BODIES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "quantize_block": (quantize_block, _fake_quantize_block),
    "dequantize_block": (dequantize_block, _fake_dequantize_block),
    "quantize_float": (quantize_float, _fake_quantize_float),
    "dequantize_float": (dequantize_float, _fake_dequantize_block),
    "quantize_codebook": (quantize_codebook, _fake_codebook),
    "dequantize_codebook": (dequantize_codebook, _fake_dequantize_codebook),
    "choose_scales": (choose_scales, _fake_choose_scales),
}

for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]
for _name, (_run, _fake) in _BODIES.items():
    # Plain torch, so one kernel serves every device; rounding has no gradient.
    torch.library.impl(_LIBRARY, _name, "CompositeExplicitAutograd")(_contiguous(_run))
    torch.library.register_fake(f"pt2e_quant::{_name}", lib=_LIBRARY)(_fake)

_lib = torch.ops.pt2e_quant

QuantizeBlock = _lib.quantize_block.default
DequantizeBlock = _lib.dequantize_block.default
QuantizeFloat = _lib.quantize_float.default
DequantizeFloat = _lib.dequantize_float.default
QuantizeCodeBook = _lib.quantize_codebook.default
DequantizeCodeBook = _lib.dequantize_codebook.default
ChooseScales = _lib.choose_scales.default

DECOMPOSITIONS = MappingProxyType(
    {getattr(_lib, name).default: _contiguous(run) for name, (run, _) in _BODIES.items()}
)
"""Each operator of this file written out in ATen operators, for `run_decompositions`."""


def is_choose_scales(node: Node) -> bool:
    """True if a node finds scales at run time."""
    return node.op == "call_function" and node.target is ChooseScales
