"""Quantization primitives as operators, and the import of every other operator of the package.

All operators that a converted graph may hold are registered here: a program that
`torch.export.save` wrote can be read wherever this package is imported.

The primitives are `choose_qparams_affine`, `quantize_affine` and `dequantize_affine`, for blocks.
Names and meaning are torchao's, in the library `pt2e_quant`. Those of small floats and code books
are `core.formats.format_ops`: `choose_scales`, `quantize_float`, `quantize_codebook` and their
inverses. All have fake kernels, and `DECOMPOSITIONS` writes them out in ATen operators.
"""

import math
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core import cache_ops, qdq, recurrent_ops, snapshot_op, unpack_op
from pt2e_quant.core.arguments import check_tensor
from pt2e_quant.core.dtypes import limits_of
from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.core.formats import format_ops
from pt2e_quant.core.formats.blocks import grid_shape, to_rows
from pt2e_quant.core.formats.format_arithmetic import dequantize_block, quantize_block
from pt2e_quant.core.integer_ops import norms, requantize, softmax, sums, tables, windows
from pt2e_quant.core.qparams import DEFAULT_EPS

__all__ = [
    "cache_ops",
    "format_ops",
    "norms",
    "qdq",
    "recurrent_ops",
    "requantize",
    "snapshot_op",
    "softmax",
    "sums",
    "tables",
    "unpack_op",
    "windows",
]
_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_MAPPINGS = ("SYMMETRIC", "ASYMMETRIC")


def _limits(dtype: torch.dtype, low: int | None, high: int | None) -> tuple[int, int]:
    limits = limits_of(dtype)
    return (limits.quant_min if low is None else low, limits.quant_max if high is None else high)


def choose_qparams_affine(
    input: Tensor,
    mapping_type: str,
    block_size: Sequence[int],
    target_dtype: torch.dtype,
    quant_min: int | None = None,
    quant_max: int | None = None,
    eps: float | None = None,
    scale_dtype: torch.dtype | None = None,
    zero_point_dtype: torch.dtype | None = None,
    keepdim: bool = True,
) -> tuple[Tensor, Tensor]:
    """Scales and zero points of blocks that cover their ranges and 0.0.

    The arithmetic is `core.qparams.choose_qparams`'s, for each block.

    Args:
        input: float.
        mapping_type: "SYMMETRIC" (0 is 0, or the middle of unsigned integers) or "ASYMMETRIC".
        block_size: a length for each axis, -1 for all of it.
        target_dtype: an integer dtype.
        quant_min: least integer used.
        quant_max: greatest integer used.
        eps: the least scale.
        scale_dtype: of the scales, float32 by default.
        zero_point_dtype: of the zero points, int32 by default.
        keepdim: give them the shape of the grid; otherwise axes of one block are left out.

    Raises:
        ConfigError: there is no such mapping.
    """
    check_tensor("input", input, is_real=False)
    if mapping_type not in _MAPPINGS:
        raise ConfigError(f'there is no mapping "{mapping_type}": {near(mapping_type, _MAPPINGS)}')
    low, high = _limits(target_dtype, quant_min, quant_max)
    rows = to_rows(input.to(torch.float32), block_size)
    least, most = rows.amin(1).clamp(max=0.0), rows.amax(1).clamp(min=0.0)
    if mapping_type == "SYMMETRIC":
        most = torch.maximum(-least, most)
        scale = (most / (float(high - low) / 2)).clamp(min=eps or DEFAULT_EPS)
        middle = 0 if low < 0 else (low + high + 1) // 2
        zero = torch.full_like(scale, middle, dtype=torch.int32)
    else:
        width = (most - least).clamp(max=torch.finfo(torch.float32).max)
        scale = (width / float(high - low)).clamp(min=eps or DEFAULT_EPS)
        zero = (low - torch.round(least / scale).to(torch.int64)).clamp(low, high)
    grid: tuple[int, ...] = grid_shape(input.shape, block_size)
    if not keepdim:
        grid = tuple(size for size in grid if size != 1) or (1,)
    return (
        scale.to(scale_dtype or torch.float32).reshape(grid),
        zero.to(zero_point_dtype or torch.int32).reshape(grid),
    )


def quantize_affine(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    output_dtype: torch.dtype,
    quant_min: int | None = None,
    quant_max: int | None = None,
) -> Tensor:
    """Integers: round(x / scale) + zero_point, clamped, in the storage of output_dtype."""
    low, high = _limits(output_dtype, quant_min, quant_max)
    scales, zero = _on_grid(input, block_size, scale, zero_point)
    storage = limits_of(output_dtype).storage
    return quantize_block(input, scales, zero, block_size, low, high, storage)


def dequantize_affine(
    input: Tensor,
    block_size: Sequence[int],
    scale: Tensor,
    zero_point: Tensor | None,
    input_dtype: torch.dtype,
    quant_min: int | None = None,
    quant_max: int | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Real values: (q - zero_point) * scale in float32, then in output_dtype."""
    low, high = _limits(input_dtype, quant_min, quant_max)
    scales, zero = _on_grid(input, block_size, scale, zero_point)
    of_blocks = (block_size, low, high, input.dtype)
    return dequantize_block(input, scales, zero, *of_blocks, out_dtype=output_dtype)


def _on_grid(
    input: Tensor, block_size: Sequence[int], scale: Tensor, zero_point: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Scales and zero points in the shape of the grid of blocks."""
    check_tensor("input", input, is_real=False)
    grid = grid_shape(input.shape, block_size)
    made: list[Tensor | None] = []
    for name, value in (("scale", scale), ("zero_point", zero_point)):
        if value is None and name == "zero_point":
            made.append(None)
            continue
        check_tensor(name, value, is_real=False)
        assert value is not None
        count, blocks = value.numel(), math.prod(grid)
        # Symbols of dynamic shapes are left alone: comparing them would fix them.
        if isinstance(count, int) and isinstance(blocks, int) and count != blocks:
            raise ConfigError(
                f"{name} has a value for each of {list(grid)} blocks, found {list(value.shape)}"
            )
        made.append(value.reshape(grid))
    scales = made[0]
    assert scales is not None
    return scales, made[1]


def _fake_choose(
    input: Tensor, mapping_type: str, block_size: Sequence[int], *rest: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    given = dict(zip(_CHOOSE_NAMES, rest, strict=False)) | named
    grid: tuple[int, ...] = grid_shape(input.shape, block_size)
    if given.get("keepdim") is False:
        grid = tuple(size for size in grid if size != 1) or (1,)
    return (
        input.new_empty(grid, dtype=given.get("scale_dtype") or torch.float32),
        input.new_empty(grid, dtype=given.get("zero_point_dtype") or torch.int32),
    )


_CHOOSE_NAMES = (
    "target_dtype",
    "quant_min",
    "quant_max",
    "eps",
    "scale_dtype",
    "zero_point_dtype",
    "keepdim",
)


def _fake_quantize(
    input: Tensor, block_size: Any, scale: Any, zero: Any, output_dtype: torch.dtype, *rest: Any
) -> Tensor:
    return input.new_empty(input.shape, dtype=limits_of(output_dtype).storage)


def _fake_dequantize(
    input: Tensor, *rest: Any, output_dtype: torch.dtype = torch.float32, **named: Any
) -> Tensor:
    dtype = rest[6] if len(rest) > 6 else output_dtype
    return input.new_empty(input.shape, dtype=dtype)


_SCHEMAS = (
    "choose_qparams_affine(Tensor input, str mapping_type, int[] block_size, "
    "ScalarType target_dtype, int? quant_min=None, int? quant_max=None, float? eps=None, "
    "ScalarType? scale_dtype=None, ScalarType? zero_point_dtype=None, bool keepdim=True) "
    "-> (Tensor, Tensor)",
    "quantize_affine(Tensor input, int[] block_size, Tensor scale, Tensor? zero_point, "
    "ScalarType output_dtype, int? quant_min=None, int? quant_max=None) -> Tensor",
    "dequantize_affine(Tensor input, int[] block_size, Tensor scale, Tensor? zero_point, "
    "ScalarType input_dtype, int? quant_min=None, int? quant_max=None, "
    "ScalarType output_dtype=float) -> Tensor",
)
_BODIES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "choose_qparams_affine": (choose_qparams_affine, _fake_choose),
    "quantize_affine": (quantize_affine, _fake_quantize),
    "dequantize_affine": (dequantize_affine, _fake_dequantize),
}


def _laid_out(run: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose result has the layout of the fake kernel's."""

    def contiguous(*args: Any, **named: Any) -> Any:
        made = run(*args, **named)
        return made.contiguous() if isinstance(made, Tensor) else made

    return contiguous


for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)  # type: ignore[no-untyped-call]
for _name, (_run, _fake) in _BODIES.items():
    torch.library.impl(_LIBRARY, _name, "CompositeExplicitAutograd")(_laid_out(_run))
    torch.library.register_fake(f"pt2e_quant::{_name}", lib=_LIBRARY)(_fake)

DECOMPOSITIONS = MappingProxyType(
    {
        getattr(torch.ops.pt2e_quant, name).default: _laid_out(run)
        for name, (run, _) in _BODIES.items()
    }
    | dict(format_ops.DECOMPOSITIONS)
)
"""Every primitive written out in ATen operators, for `ExportedProgram.run_decompositions`."""
