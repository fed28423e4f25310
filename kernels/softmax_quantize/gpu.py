"""softmax_quantize in Triton: a program holds whole rows, which are read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.gpu import requantize
from pt2e_quant.kernels.launch import check_operands, launching
from pt2e_quant.kernels.quantize_per_token.gpu import PRECISIONS, round_to
from pt2e_quant.kernels.softmax_quantize.reference import check_scores
from pt2e_quant.kernels.tiles import TileConfig, columns_class, tiles_for


@triton.jit(do_not_specialize=["out_zero_point", "out_min", "out_max"])
def softmax_quantize_kernel(
    x, mask, out, M, K, heads, queries, mask_image, mask_head, mask_query, mask_key, scale,
    inverse_scale, out_zero_point, out_min, out_max,
    HAS_MASK: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of at most BLOCK_K scores; rows are images x heads x queries."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_K)
    in_rows, in_columns = rows < M, columns < K
    inside = in_rows[:, None] & in_columns[None, :]
    place = rows.to(tl.int64)[:, None] * K + columns[None, :]
    real = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_MASK:
        head = rows // queries
        start = (head // heads).to(tl.int64) * mask_image
        start += (head % heads) * mask_head + (rows % queries) * mask_query
        at = start[:, None] + columns[None, :] * mask_key
        real += tl.load(mask + at, mask=inside, other=0.0).to(tl.float32)
    # Rows behind the last are 0 throughout: their maximum must be a number too.
    real = tl.where(in_columns[None, :] | (rows >= M)[:, None], real, float("-inf"))
    powers = tl.exp(real - tl.max(real, axis=1)[:, None])
    made = powers / tl.sum(powers, axis=1)[:, None]
    steps = requantize(round_to(made, PRECISION), inverse_scale, out_zero_point, out_min, out_max)
    tl.store(out + place, steps.to(out.dtype.element_ty), mask=inside)


def softmax_quantize(
    x: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    value_dtype: torch.dtype = torch.float32,
    *,
    out_dtype: torch.dtype = torch.int8,
    out_scale: float = 1.0 / 256,
    out_zero_point: int = -128,
    out_min: int = -128,
    out_max: int = 127,
    label: str = "",
    tiles: TileConfig | None = None,
) -> Tensor:
    """Launch the kernel; see `op.SoftmaxQuantize` for the arguments, `tiles` replaces the tables'.

    Scores that are not contiguous are copied first; a mask is read where it lies.

    Raises:
        InputError: dtypes, devices or shapes that the kernel does not take.
        UnsupportedError: the GPU is too old.
    """
    end = Epilogue(
        out_dtype=out_dtype,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
        out_min=out_min,
        out_max=out_max,
    )
    kinds = tuple(PRECISIONS)
    held = {"x": x, "mask": mask}
    check_operands(
        "softmax_quantize", {name: (t, kinds) for name, t in held.items() if t is not None}
    )
    check_scores(x, mask)
    out = x.new_empty(x.shape, dtype=out_dtype)
    if out.numel() == 0:
        return out
    images, heads, queries, K = (*(1,) * (4 - x.dim()), *x.shape)
    strides = (0, 0, 0, 0)
    if mask is not None:
        strides = mask.expand(images, heads, queries, K).stride()  # type: ignore[assignment]  # four
    M = images * heads * queries
    chosen = tiles or tiles_for("softmax_quantize", x.device, columns_class(K))
    with launching("softmax_quantize", label, x.device):
        softmax_quantize_kernel[(triton.cdiv(M, chosen["BLOCK_M"]),)](
            x=x.contiguous(),
            mask=mask,
            out=out,
            M=M,
            K=K,
            heads=heads,
            queries=queries,
            mask_image=strides[0],
            mask_head=strides[1],
            mask_query=strides[2],
            mask_key=strides[3],
            scale=scale,
            inverse_scale=end.inverse_scale,
            out_zero_point=end.out_zero_point,
            out_min=end.out_min,
            out_max=end.out_max,
            HAS_MASK=mask is not None,
            PRECISION=PRECISIONS[value_dtype],
            # A fused multiply-add would skip a rounding that the definition has.
            enable_fp_fusion=False,
            **chosen.options(),
        )
    return out
