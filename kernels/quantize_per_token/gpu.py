"""quantize_per_token in Triton: a program reads its rows once, and again only if they are long."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.epilogue.gpu import e4m3_codes
from pt2e_quant.kernels.launch import check_fp8, check_operands, launching
from pt2e_quant.kernels.tiles import TileConfig, columns_class, tiles_for

__all__ = [
    "PRECISIONS",
    "magnitude_bits",
    "quantize_per_token",
    "quantize_per_token_e4m3",
    "quantize_per_token_e4m3_kernel",
    "quantize_per_token_kernel",
    "quantize_row",
    "quantize_row_e4m3",
    "round_to",
    "row_qparams",
    "row_scale_e4m3",
]

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
def row_qparams(low, high, PRECISION: tl.constexpr):
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
def quantize_row(x, scale, zero_point, quant_min, quant_max):
    """Int32 steps of float32 rows [M, K]; scale and zero_point are float32[M].

    In float64, as torch computes with its float64 scales. Adding 1.5 * 2**52 rounds halves to even
    and leaves the integer, which qparams of the row itself keep small, in the low bits.
    """
    inverse = 1.0 / scale.to(tl.float64)
    steps = x.to(tl.float64) * inverse[:, None] + zero_point.to(tl.float64)[:, None]
    whole = (steps + 6755399441055744.0).to(tl.int64, bitcast=True).to(tl.int32)
    return tl.minimum(tl.maximum(whole, quant_min), quant_max)


@triton.jit(do_not_specialize=["quant_min", "quant_max"])
def quantize_per_token_kernel(
    x,
    integers,
    scale,
    zero_point,
    M,
    K,
    quant_min,
    quant_max,
    PRECISION: tl.constexpr,
    IN_ONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_M rows; IN_ONE says that they fit in one tile. Padding is 0, in every row's range."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < M
    depth = tl.arange(0, BLOCK_K)
    place = rows[:, None] * K + depth[None, :]
    if IN_ONE:
        inside = in_rows[:, None] & (depth < K)[None, :]
        held = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        low, high = tl.min(held, axis=1), tl.max(held, axis=1)
    else:
        least = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
        greatest = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
        for start in range(0, K, BLOCK_K):
            inside = in_rows[:, None] & (depth < K - start)[None, :]
            part = tl.load(x + place + start, mask=inside, other=0.0).to(tl.float32)
            least, greatest = tl.minimum(least, part), tl.maximum(greatest, part)
        low, high = tl.min(least, axis=1), tl.max(greatest, axis=1)
    row_scale, row_zero = row_qparams(tl.minimum(low, 0.0), tl.maximum(high, 0.0), PRECISION)
    tl.store(scale + rows, row_scale, mask=in_rows)
    tl.store(zero_point + rows, row_zero.to(tl.int32), mask=in_rows)
    if IN_ONE:
        steps = quantize_row(held, row_scale, row_zero, quant_min, quant_max)
        inside = in_rows[:, None] & (depth < K)[None, :]
        tl.store(integers + place, steps.to(tl.int8), mask=inside)
    else:
        for start in range(0, K, BLOCK_K):
            inside = in_rows[:, None] & (depth < K - start)[None, :]
            part = tl.load(x + place + start, mask=inside, other=0.0).to(tl.float32)
            steps = quantize_row(part, row_scale, row_zero, quant_min, quant_max)
            tl.store(integers + place + start, steps.to(tl.int8), mask=inside)


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
def quantize_per_token_e4m3_kernel(
    x,
    codes,
    scale,
    M,
    K,
    IN_ONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """BLOCK_M rows; IN_ONE says that they fit in one tile."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < M
    depth = tl.arange(0, BLOCK_K)
    place = rows[:, None] * K + depth[None, :]
    if IN_ONE:
        inside = in_rows[:, None] & (depth < K)[None, :]
        held = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        row_scale = row_scale_e4m3(tl.max(magnitude_bits(held), axis=1))
        tl.store(codes + place, quantize_row_e4m3(held, row_scale), mask=inside)
    else:
        greatest = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.int32)
        for start in range(0, K, BLOCK_K):
            inside = in_rows[:, None] & (depth < K - start)[None, :]
            part = tl.load(x + place + start, mask=inside, other=0.0).to(tl.float32)
            greatest = tl.maximum(greatest, magnitude_bits(part))
        row_scale = row_scale_e4m3(tl.max(greatest, axis=1))
        for start in range(0, K, BLOCK_K):
            inside = in_rows[:, None] & (depth < K - start)[None, :]
            part = tl.load(x + place + start, mask=inside, other=0.0).to(tl.float32)
            tl.store(codes + place + start, quantize_row_e4m3(part, row_scale), mask=inside)
    tl.store(scale + rows, row_scale, mask=in_rows)


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
    M, K = _rows("quantize_per_token", x)
    x = x.contiguous()
    integers = torch.empty_like(x, dtype=torch.int8)
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    zero_point = torch.empty_like(scale, dtype=torch.int32)
    if M == 0:
        return integers, scale, zero_point
    chosen = tiles or tiles_for("quantize_per_token", x.device, columns_class(K))
    with launching("quantize_per_token", label, x.device):
        quantize_per_token_kernel[(triton.cdiv(M, chosen["BLOCK_M"]),)](
            x=x,
            integers=integers,
            scale=scale,
            zero_point=zero_point,
            M=M,
            K=K,
            quant_min=quant_min,
            quant_max=quant_max,
            PRECISION=PRECISIONS[x.dtype],
            IN_ONE=chosen["BLOCK_K"] >= K,
            # A fused multiply-add would skip a rounding that the definition has.
            enable_fp_fusion=False,
            **chosen.options(),
        )
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
    M, K = _rows(op, x)
    check_fp8(op, x.device)
    x = x.contiguous()
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    if M == 0:
        return codes, scale
    chosen = tiles or tiles_for("quantize_per_token", x.device, columns_class(K))
    with launching(op, label, x.device):
        quantize_per_token_e4m3_kernel[(triton.cdiv(M, chosen["BLOCK_M"]),)](
            x=x,
            codes=codes,
            scale=scale,
            M=M,
            K=K,
            IN_ONE=chosen["BLOCK_K"] >= K,
            enable_fp_fusion=False,
            **chosen.options(),
        )
    return codes, scale


def _rows(op: str, x: Tensor) -> tuple[int, int]:
    """How many rows x has, and how long they are."""
    check_operands(op, {"x": (x, tuple(PRECISIONS))})
    K = x.shape[-1] if x.dim() else 0
    if K == 0:
        raise InputError(f"{op} takes rows of at least one element, found {x.shape}")
    return x.numel() // K, K
