"""norm_quantize in Triton: a program holds whole rows, which are read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.gpu import stored
from pt2e_quant.kernels.launch import check_fp8, check_operands, check_shapes, launching
from pt2e_quant.kernels.norm_quantize.norm import LONGEST, Norm
from pt2e_quant.kernels.quantize_per_token.gpu import PRECISIONS, quantize_held_rows, round_to
from pt2e_quant.kernels.tiles import TileConfig, columns_class, tiles_for


@triton.jit
def _mean(x, K):
    total = tl.sum(x, axis=1)
    return tl.div_rn(total, tl.zeros_like(total) + K.to(tl.float32))


@triton.jit(do_not_specialize=["out_zero_point", "out_min", "out_max"])
def norm_quantize_kernel(
    x, weight, bias, out, scale, zero_point, M, K, eps, out_scaling, out_zero_point, out_min,
    out_max,
    KIND: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr, PRECISION: tl.constexpr, PER_TOKEN: tl.constexpr,
    IS_E4M3: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of at most BLOCK_K elements; padding is 0 in every step."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    in_rows, in_columns = rows < M, columns < K
    inside = in_rows[:, None] & in_columns[None, :]
    place = rows[:, None] * K + columns[None, :]
    real = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if KIND == "layer":
        real = tl.where(inside, real - _mean(real, K)[:, None], 0.0)
    root = tl.sqrt_rn(_mean(real * real, K) + eps)
    real = real * tl.div_rn(tl.zeros_like(root) + 1.0, root)[:, None]
    if ROUNDS_FIRST:
        real = round_to(real, PRECISION)
    if HAS_WEIGHT:
        real *= tl.load(weight + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        real += tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    real = round_to(real, PRECISION)
    if PER_TOKEN:
        made = quantize_held_rows(
            real, scale, zero_point, rows, in_rows, out_min, out_max, PRECISION, IS_E4M3
        )
    else:
        made = stored(real, out, out_scaling, out_zero_point, out_min, out_max, not IS_E4M3)
    tl.store(out + place, made, mask=inside)


def norm_quantize(
    x: Tensor,
    kind: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    rounds_first: bool = False,
    value_dtype: torch.dtype = torch.float32,
    *,
    out_dtype: torch.dtype = torch.int8,
    out_scale: float = 1.0,
    out_zero_point: int = 0,
    out_min: int = -128,
    out_max: int = 127,
    label: str = "",
    tiles: TileConfig | None = None,
) -> Tensor:
    """Launch the kernel for static qparams; `tiles` replaces the tables'.

    See `op.NormQuantize` for the arguments. What is not contiguous is copied first.

    Raises:
        InputError: a dtype, a device or a row length that the kernel does not take.
        UnsupportedError: the GPU is too old.
    """
    end = Epilogue(
        out_dtype=out_dtype,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
        out_min=out_min,
        out_max=out_max,
    )
    norm = Norm(kind, weight, bias, eps, rounds_first, value_dtype)
    out = x.new_empty(x.shape, dtype=out_dtype)
    _launch("norm_quantize", x, norm, end, (out, None, None), label, tiles)
    return out


def norm_quantize_per_token(
    x: Tensor,
    kind: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    rounds_first: bool = False,
    value_dtype: torch.dtype = torch.float32,
    *,
    quant_min: int = -128,
    quant_max: int = 127,
    label: str = "",
    tiles: TileConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel for qparams of each row; `tiles` replaces the tables'.

    See `op.NormQuantizePerToken` for the arguments. What is not contiguous is copied first.

    Raises:
        InputError: a dtype, a device or a row length that the kernel does not take.
        UnsupportedError: the GPU is too old.
    """
    end = Epilogue(out_dtype=torch.int8, out_min=quant_min, out_max=quant_max)
    norm = Norm(kind, weight, bias, eps, rounds_first, value_dtype)
    integers = x.new_empty(x.shape, dtype=torch.int8)
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    zero_point = torch.empty_like(scale, dtype=torch.int32)
    results = (integers, scale, zero_point)
    _launch("norm_quantize_per_token", x, norm, end, results, label, tiles)
    return results


def norm_quantize_per_token_e4m3(
    x: Tensor,
    kind: str,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    rounds_first: bool = False,
    value_dtype: torch.dtype = torch.float32,
    *,
    label: str = "",
    tiles: TileConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel for 8-bit floats and the scale of each row; `tiles` replaces the tables'.

    See `op.NormQuantizePerTokenE4m3` for the arguments. What is not contiguous is copied first.

    Raises:
        InputError: a dtype, a device or a row length that the kernel does not take.
        UnsupportedError: the GPU is too old.
    """
    end = Epilogue(out_dtype=torch.float8_e4m3fn)
    norm = Norm(kind, weight, bias, eps, rounds_first, value_dtype)
    codes = x.new_empty(x.shape, dtype=end.out_dtype)
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    _launch("norm_quantize_per_token_e4m3", x, norm, end, (codes, scale, None), label, tiles)
    return codes, scale


def _launch(
    op: str,
    x: Tensor,
    norm: Norm,
    end: Epilogue,
    results: tuple[Tensor, Tensor | None, Tensor | None],
    label: str,
    tiles: TileConfig | None,
) -> None:
    """Write the results; without scales and zero points they are quantized as `end` says."""
    held = {"x": x, "weight": norm.weight, "bias": norm.bias}
    kinds = tuple(PRECISIONS)
    check_operands(op, {name: (t, kinds) for name, t in held.items() if t is not None})
    K = x.shape[-1] if x.dim() else 0
    if not 1 <= K <= LONGEST:
        raise InputError(f"{op} takes rows of 1 to {LONGEST} elements, found {tuple(x.shape)}")
    check_shapes(op, {"weight": (norm.weight, (K,)), "bias": (norm.bias, (K,))})
    out, scale, zero_point = results
    is_e4m3 = out.dtype is torch.float8_e4m3fn
    if is_e4m3:
        check_fp8(op, x.device)
    if out.numel() == 0:
        return
    chosen = tiles or tiles_for("norm_quantize", x.device, columns_class(K))
    M = x.numel() // K
    with launching(op, label, x.device):
        norm_quantize_kernel[(triton.cdiv(M, chosen["BLOCK_M"]),)](
            x=x.contiguous(),
            weight=None if norm.weight is None else norm.weight.contiguous(),
            bias=None if norm.bias is None else norm.bias.contiguous(),
            out=out,
            scale=scale,
            zero_point=zero_point,
            M=M,
            K=K,
            eps=norm.eps,
            out_scaling=end.scaling,
            out_zero_point=end.out_zero_point,
            out_min=end.out_min,
            out_max=end.out_max,
            KIND=str(norm.kind),
            HAS_WEIGHT=norm.weight is not None,
            HAS_BIAS=norm.bias is not None,
            ROUNDS_FIRST=norm.rounds_first,
            PRECISION=PRECISIONS[norm.value_dtype],
            PER_TOKEN=scale is not None,
            IS_E4M3=is_e4m3,
            # A fused multiply-add would skip a rounding that the definition has.
            enable_fp_fusion=False,
            **chosen.options(),
        )
