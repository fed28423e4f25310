"""quantize_per_token in Triton: a program reads its rows once, and again only if they are long."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.epilogue.gpu import e4m3_codes
from pt2e_quant.kernels.launch import check_fp8, check_operands, launching
from pt2e_quant.kernels.tiles import TileConfig, columns_class, tiles_for

PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""The dtypes that kernels take rows in, by the names that `round_to` has for them."""


@triton.jit
def round_to(x, PRECISION: tl.constexpr):
    """Float32 values rounded to what a narrower dtype holds: to the nearest, ties to even.

    For bfloat16 on the bits, as the interpreter's cast truncates.
    """
    if PRECISION == "bf16":
        bits = x.to(tl.int32, bitcast=True)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        return bits.to(tl.float32, bitcast=True)
    elif PRECISION == "fp16":
        return x.to(tl.float16).to(tl.float32)
    else:
        tl.static_assert(PRECISION == "fp32", "no such precision")
        return x


@triton.jit
def _row_qparams(low, high, PRECISION: tl.constexpr):
    """Scale and zero point, both float32, of rows with these least and greatest values.

    low is at most 0 and high at least 0. See `reference.row_qparams` for the steps, each of
    which is rounded to the rows' dtype.
    """
    scale = round_to(
        tl.div_rn(round_to(high - low, PRECISION), tl.zeros_like(high) + 255.0), PRECISION
    )
    scale = tl.maximum(scale, 1.1920928955078125e-07)
    low_steps = round_to(tl.div_rn(low, scale), PRECISION)
    high_steps = round_to(tl.div_rn(high, scale), PRECISION)
    error = round_to(low_steps - 128.0, PRECISION) + round_to(high_steps + 127.0, PRECISION)
    from_low = round_to(-128.0 - low_steps, PRECISION)
    from_high = round_to(127.0 - high_steps, PRECISION)
    zero_point = tl.where(error > 0.0, from_low, from_high)
    zero_point = tl.minimum(tl.maximum(zero_point, -128.0), 127.0)
    return scale, (zero_point + 12582912.0) - 12582912.0


@triton.jit
def _quantize_row(x, scale, zero_point, quant_min, quant_max):
    """Int32 steps of float32 rows [M, K]; scale and zero_point are float32[M].

    In float64, as torch computes with its float64 scales. Adding 1.5 * 2**52 rounds halves to even
    and leaves the integer, which qparams of the row itself keep small, in the low bits.
    """
    inverse = 1.0 / scale.to(tl.float64)
    steps = x.to(tl.float64) * inverse[:, None] + zero_point.to(tl.float64)[:, None]
    whole = (steps + 6755399441055744.0).to(tl.int64, bitcast=True).to(tl.int32)
    return tl.minimum(tl.maximum(whole, quant_min), quant_max)


@triton.jit
def magnitude_bits(x):
    """The magnitudes of float32 values as integers: in the same order, and NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def row_scale_e4m3(greatest_bits):
    """The float32 scale at which the greatest of `magnitude_bits` is 448; NaN stays NaN."""
    greatest = greatest_bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(greatest, tl.zeros_like(greatest) + 448.0)
    least = 1.1754943508222875e-38  # the least normal number
    return tl.where(scale < least, least, scale)


@triton.jit
def quantize_row_e4m3(x, scale):
    """Codes of float32 rows [M, K]; scale is float32[M]."""
    return e4m3_codes(tl.div_rn(x, tl.zeros_like(x) + scale[:, None]))


@triton.jit
def _reach(x, IS_E4M3: tl.constexpr):
    """The numbers whose maximum is taken: the values, or for codes `magnitude_bits`."""
    if IS_E4M3:
        return magnitude_bits(x)
    else:
        return x


@triton.jit
def _chosen(least, greatest, PRECISION: tl.constexpr, IS_E4M3: tl.constexpr):
    """Scales and zero points, both float32, of rows [M, K]; greatest is of `_reach`."""
    if IS_E4M3:
        row_scale = row_scale_e4m3(tl.max(greatest, axis=1))
        return row_scale, tl.zeros_like(row_scale)
    else:
        low, high = tl.min(least, axis=1), tl.max(greatest, axis=1)
        return _row_qparams(tl.minimum(low, 0.0), tl.maximum(high, 0.0), PRECISION)


@triton.jit
def _store_qparams(scale, zero_point, rows, in_rows, row_scale, row_zero, IS_E4M3: tl.constexpr):
    tl.store(scale + rows, row_scale, mask=in_rows)
    if not IS_E4M3:
        tl.store(zero_point + rows, row_zero.to(tl.int32), mask=in_rows)


@triton.jit
def _codes(real, row_scale, row_zero, quant_min, quant_max, IS_E4M3: tl.constexpr):
    """Codes of float32 rows [M, K], int8 or float8e4nv."""
    if IS_E4M3:
        return quantize_row_e4m3(real, row_scale)
    else:
        return _quantize_row(real, row_scale, row_zero, quant_min, quant_max).to(tl.int8)


@triton.jit
def quantize_held_rows(
    real,
    scale,
    zero_point,
    rows,
    in_rows,
    quant_min,
    quant_max,
    PRECISION: tl.constexpr,
    IS_E4M3: tl.constexpr,
):
    """Codes of whole rows in float32, whose qparams are stored; padding is 0, in every range."""
    row_scale, row_zero = _chosen(real, _reach(real, IS_E4M3), PRECISION, IS_E4M3)
    _store_qparams(scale, zero_point, rows, in_rows, row_scale, row_zero, IS_E4M3)
    return _codes(real, row_scale, row_zero, quant_min, quant_max, IS_E4M3)


@triton.jit(do_not_specialize=["quant_min", "quant_max"])
def quantize_per_token_kernel(
    x, out, scale, zero_point, M, K, quant_min, quant_max,
    PRECISION: tl.constexpr, IS_E4M3: tl.constexpr, IN_ONE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows; IN_ONE says that they fit in one tile."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < M
    depth = tl.arange(0, BLOCK_K)
    place = rows[:, None] * K + depth[None, :]
    if IN_ONE:
        inside = in_rows[:, None] & (depth < K)[None, :]
        held = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        made = quantize_held_rows(
            held, scale, zero_point, rows, in_rows, quant_min, quant_max, PRECISION, IS_E4M3
        )
        tl.store(out + place, made, mask=inside)
    else:
        least = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
        greatest = _reach(least, IS_E4M3)
        for start in range(0, K, BLOCK_K):
            inside = in_rows[:, None] & (depth < K - start)[None, :]
            part = tl.load(x + place + start, mask=inside, other=0.0).to(tl.float32)
            least, greatest = tl.minimum(least, part), tl.maximum(greatest, _reach(part, IS_E4M3))
        row_scale, row_zero = _chosen(least, greatest, PRECISION, IS_E4M3)
        _store_qparams(scale, zero_point, rows, in_rows, row_scale, row_zero, IS_E4M3)
        for start in range(0, K, BLOCK_K):
            inside = in_rows[:, None] & (depth < K - start)[None, :]
            part = tl.load(x + place + start, mask=inside, other=0.0).to(tl.float32)
            made = _codes(part, row_scale, row_zero, quant_min, quant_max, IS_E4M3)
            tl.store(out + place + start, made, mask=inside)


def quantize_per_token(
    x: Tensor,
    quant_min: int = -128,
    quant_max: int = 127,
    *,
    label: str = "",
    tiles: TileConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel; see `op.QuantizeRows` for the arguments, `tiles` replaces the tables'.

    What is not contiguous is copied first.

    Raises:
        InputError: a dtype that the kernel does not take, or rows of no elements.
        UnsupportedError: the GPU is too old.
    """
    scale, limits = _scales("quantize_per_token", x), (quant_min, quant_max)
    integers = x.new_empty(x.shape, dtype=torch.int8)
    zero_point = torch.empty_like(scale, dtype=torch.int32)
    _launch("quantize_per_token", x, (integers, scale, zero_point), limits, label, tiles)
    return integers, scale, zero_point


def quantize_per_token_e4m3(
    x: Tensor, *, label: str = "", tiles: TileConfig | None = None
) -> tuple[Tensor, Tensor]:
    """Launch the kernel; see `op.QuantizeRowsE4m3` for the arguments, `tiles` replaces the tables'.

    What is not contiguous is copied first.

    Raises:
        InputError: a dtype that the kernel does not take, or rows of no elements.
        UnsupportedError: the GPU is too old.
    """
    op = "quantize_per_token_e4m3"
    scale = _scales(op, x)
    check_fp8(op, x.device)
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    _launch(op, x, (codes, scale, None), (0, 0), label, tiles)
    return codes, scale


def _scales(op: str, x: Tensor) -> Tensor:
    """Room for a scale a row."""
    check_operands(op, {"x": (x, tuple(PRECISIONS))})
    if not x.dim() or not x.shape[-1]:
        raise InputError(f"{op} takes rows of at least one element, found {x.shape}")
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _launch(
    op: str,
    x: Tensor,
    results: tuple[Tensor, Tensor, Tensor | None],
    limits: tuple[int, int],
    label: str,
    tiles: TileConfig | None,
) -> None:
    """Write the results: codes, scales, and zero points of integers."""
    out, scale, zero_point = results
    M, K = scale.numel(), x.shape[-1]
    if M == 0:
        return
    chosen = tiles or tiles_for("quantize_per_token", x.device, columns_class(K))
    with launching(op, label, x.device):
        quantize_per_token_kernel[(triton.cdiv(M, chosen["BLOCK_M"]),)](
            x=x.contiguous(),
            out=out,
            scale=scale,
            zero_point=zero_point,
            M=M,
            K=K,
            quant_min=limits[0],
            quant_max=limits[1],
            PRECISION=PRECISIONS[x.dtype],
            IS_E4M3=zero_point is None,
            IN_ONE=chosen["BLOCK_K"] >= K,
            # A fused multiply-add would skip a rounding that the definition has.
            enable_fp_fusion=False,
            **chosen.options(),
        )
