"""quantize_per_tensor in Triton: programs find the range of parts, then each joins all parts'.

Nothing is added, and the least and greatest of parts have no order: results are equal from run to
run. The second launch waits for the first on the stream, so that a CUDA graph holds both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.epilogue.gpu import requantize, round_half_even
from pt2e_quant.kernels.launch import check_fp8, check_operands, launching
from pt2e_quant.kernels.quantize_per_token.gpu import (
    PRECISIONS,
    magnitude_bits,
    quantize_row_e4m3,
    round_to,
    row_scale_e4m3,
)
from pt2e_quant.kernels.tiles import TileConfig, elements_class, tiles_for

_ONE = 8192


def shape_class(elements: int) -> str:
    """The class by the number of elements: if one program holds them, one launch is enough.

    >>> [shape_class(n) for n in (4096, 8193, 2**20)]
    ['one', 'small', 'large']
    """
    return "one" if elements <= _ONE else elements_class(elements)


_PARTIALS = {False: torch.float32, True: torch.int32}
"""The dtype of partial ranges, by whether they are of 8-bit floats."""


@triton.jit
def _place(turn, BLOCK: tl.constexpr):
    """The elements [1, BLOCK] that a program has in a turn."""
    block = (turn * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    return block * BLOCK + tl.arange(0, BLOCK)[None, :]


@triton.jit
def partial_ranges_kernel(
    x,
    partials,
    size,
    turns,
    IS_E4M3: tl.constexpr,
    PARTIALS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The range of each program's blocks: least and greatest, or for codes the greatest magnitude.

    partials: float32[2, PARTIALS], or int32[1, PARTIALS] of `magnitude_bits`.
    """
    mine = partials + tl.program_id(0) + tl.arange(0, 1)
    if IS_E4M3:
        reach = tl.zeros((1, BLOCK), dtype=tl.int32)
        for turn in range(0, turns):
            place = _place(turn, BLOCK)
            part = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
            reach = tl.maximum(reach, magnitude_bits(part))
        tl.store(mine, tl.max(reach, axis=1))
    else:
        least = tl.zeros((1, BLOCK), dtype=tl.float32)
        greatest = tl.zeros((1, BLOCK), dtype=tl.float32)
        for turn in range(0, turns):
            place = _place(turn, BLOCK)
            part = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
            least, greatest = tl.minimum(least, part), tl.maximum(greatest, part)
        tl.store(mine, tl.min(least, axis=1))
        tl.store(mine + PARTIALS, tl.max(greatest, axis=1))


@triton.jit
def tensor_qparams(
    low,
    high,
    quant_min,
    quant_max,
    eps,
    PRECISION: tl.constexpr,
    SYMMETRIC: tl.constexpr,
):
    """Scale and zero point, both float32[1], of what lies between low and high and 0.

    See `reference.tensor_qparams` for the steps.
    """
    low, high = tl.minimum(low, 0.0), tl.maximum(high, 0.0)
    steps = (quant_max - quant_min).to(tl.float32)
    if SYMMETRIC:
        reach, steps = tl.maximum(-low, high), steps * 0.5
    else:
        reach = round_to(high - low, PRECISION)
    scale = round_to(tl.div_rn(reach, tl.zeros_like(reach) + steps), PRECISION)
    scale = tl.maximum(scale, eps)
    if SYMMETRIC:
        zero_point = tl.zeros_like(scale)
    else:
        least, greatest = quant_min.to(tl.float32), quant_max.to(tl.float32)
        zero_point = least - round_half_even(tl.div_rn(low, scale))
        zero_point = tl.minimum(tl.maximum(zero_point, least), greatest)
    return scale, zero_point


@triton.jit
def _made(real, scaling, zero_point, quant_min, quant_max, IS_E4M3: tl.constexpr):
    """Codes of float32 values: scaling is the scale, and one over it for integers."""
    if IS_E4M3:
        return quantize_row_e4m3(real, scaling)
    else:
        zero_steps = zero_point.to(tl.int32)[:, None]
        steps = requantize(real, scaling[:, None], zero_steps, quant_min, quant_max)
        return steps.to(tl.int8)


@triton.jit(do_not_specialize=["count", "quant_min", "quant_max"])
def quantize_tensor_kernel(
    x, out, scale, zero_point, partials, size, turns, count, quant_min, quant_max, eps,
    PRECISION: tl.constexpr, SYMMETRIC: tl.constexpr, IS_E4M3: tl.constexpr, IN_ONE: tl.constexpr,
    PARTIALS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The qparams of `count` partial ranges, or IN_ONE of the one block, and elements by them."""
    place = _place(0, BLOCK)
    if IN_ONE:
        held = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
        low, high = held, held
        if IS_E4M3:
            high = magnitude_bits(held)
    else:
        each = tl.arange(0, PARTIALS)[None, :]
        low = tl.load(partials + each, mask=each < count, other=0)
        high = low
        if not IS_E4M3:
            high = tl.load(partials + PARTIALS + each, mask=each < count, other=0)
    first = tl.program_id(0) + tl.arange(0, 1)
    if IS_E4M3:
        found = row_scale_e4m3(tl.max(high, axis=1))
        scaling, zero = found, tl.zeros_like(found)
    else:
        low, high = tl.min(low, axis=1), tl.max(high, axis=1)
        found, zero = tensor_qparams(low, high, quant_min, quant_max, eps, PRECISION, SYMMETRIC)
        tl.store(zero_point + first, zero.to(tl.int32), mask=first == 0)
        scaling = tl.div_rn(tl.zeros_like(found) + 1.0, found)
    tl.store(scale + first, found, mask=first == 0)
    if IN_ONE:
        made = _made(held, scaling, zero, quant_min, quant_max, IS_E4M3)
        tl.store(out + place, made, mask=place < size)
    else:
        for turn in range(0, turns):
            place = _place(turn, BLOCK)
            part = tl.load(x + place, mask=place < size, other=0.0).to(tl.float32)
            made = _made(part, scaling, zero, quant_min, quant_max, IS_E4M3)
            tl.store(out + place, made, mask=place < size)


def quantize_per_tensor(
    x: Tensor,
    quant_min: int = -128,
    quant_max: int = 127,
    eps: float = 2.0**-23,
    symmetric: bool = False,
    *,
    label: str = "",
    tiles: TileConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels; see `op.QuantizeTensor` for the arguments, `tiles` replaces the tables'.

    What is not dense in memory is copied first.

    Raises:
        InputError: a dtype that the kernels do not take, or limits that are no range of int8.
        UnsupportedError: the GPU is too old.
    """
    if not -128 <= quant_min < quant_max <= 127 or eps <= 0.0:
        raise InputError(
            f"quantize_per_tensor takes a range of int8 and an eps above 0, found {quant_min} .. "
            f"{quant_max} and {eps}"
        )
    limits = {"quant_min": quant_min, "quant_max": quant_max, "eps": eps, "SYMMETRIC": symmetric}
    scale = x.new_empty(1, dtype=torch.float32)
    zero_point = torch.empty_like(scale, dtype=torch.int32)
    out = torch.empty_like(x, dtype=torch.int8)
    _launch("quantize_per_tensor", x, (out, scale, zero_point), limits, label, tiles)
    return out, scale, zero_point


def quantize_per_tensor_e4m3(
    x: Tensor, *, label: str = "", tiles: TileConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the kernels; see `op.QuantizeTensorE4m3` for the arguments.

    What is not dense in memory is copied first.

    Raises:
        InputError: a dtype that the kernels do not take.
        UnsupportedError: the GPU is too old.
    """
    op = "quantize_per_tensor_e4m3"
    check_fp8(op, x.device)
    limits = {"quant_min": -1, "quant_max": 1, "eps": 1.0, "SYMMETRIC": True}  # nothing reads them
    scale = x.new_empty((1,) * x.dim(), dtype=torch.float32)
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    _launch(op, x, (codes, scale, None), limits, label, tiles)
    return codes, scale


def _launch(
    op: str,
    x: Tensor,
    results: tuple[Tensor, Tensor, Tensor | None],
    limits: dict[str, int | float | bool],
    label: str,
    tiles: TileConfig | None,
) -> None:
    """Write the results; a tensor of no elements has the qparams of zeros."""
    check_operands(op, {"x": (x, tuple(PRECISIONS))})
    out, scale, zero_point = results
    if x.stride() != out.stride():
        x = torch.empty_like(x).copy_(x)
    size = x.numel()
    chosen = tiles or tiles_for("quantize_per_tensor", x.device, shape_class(size))
    count = max(1, min(triton.cdiv(size, chosen["BLOCK"]), chosen["PARTIALS"]))
    turns = triton.cdiv(size, count * chosen["BLOCK"])
    is_e4m3, in_one = zero_point is None, size <= chosen["BLOCK"]
    shape = (1, chosen["PARTIALS"]) if is_e4m3 else (2, chosen["PARTIALS"])
    partials = None if in_one else x.new_empty(shape, dtype=_PARTIALS[is_e4m3])
    with launching(op, label, x.device):
        if partials is not None:
            partial_ranges_kernel[(count,)](
                x=x,
                partials=partials,
                size=size,
                turns=turns,
                IS_E4M3=is_e4m3,
                enable_fp_fusion=False,
                **chosen.options(),
            )
        quantize_tensor_kernel[(count,)](
            x=x,
            out=out,
            scale=scale,
            zero_point=zero_point,
            partials=partials,
            size=size,
            turns=turns,
            count=count,
            PRECISION=PRECISIONS[x.dtype],
            IS_E4M3=is_e4m3,
            IN_ONE=in_one,
            # A fused multiply-add would skip a rounding that the definition has.
            enable_fp_fusion=False,
            **limits,
            **chosen.options(),
        )
