"""Kernels for quantized tensors on CUDA devices: the Triton operators of `kernels/`."""

import torch
from torch import Tensor

from pt2e_quant.core.formats.number_formats import FP8_E4M3
from pt2e_quant.core.granularity import PerChannel, PerGroup, PerTensor, PerToken
from pt2e_quant.kernels.a8w4_linear.op import A8w4Linear
from pt2e_quant.kernels.fp8_linear.op import Fp8Linear
from pt2e_quant.kernels.int4_linear.op import Int4Linear
from pt2e_quant.kernels.int8_linear.op import Int8Linear
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRows, QuantizeRowsE4m3
from pt2e_quant.kernels.sparse_linear.op import SparseLinear, takes_groups
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.kernels.cpu_kernels import is_per_token
from pt2e_quant.tensors.kernels.kernel import TensorKernel
from pt2e_quant.tensors.layouts.gpu_weights import group_of, pairs_of
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def int4_rows(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Float rows by 4-bit weights."""
    p, size = weight.parts, group_of(weight.form)
    scale, zero = p["tile_scale"], p.get("tile_zero")
    made: Tensor = Int4Linear(x, p["tiles"], scale, zero, size, bias=bias, out_dtype=x.dtype)
    return made


def int8_by_int4(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Rows quantized to int8 at run time by 4-bit weights."""
    p = weight.parts
    codes, scale, zero = QuantizeRows(x)
    tiles = (p["halves"], p["tile_scale"], p["tile_sum"], group_of(weight.form))
    made: Tensor = A8w4Linear(
        codes, scale.reshape(-1), zero.reshape(-1), *tiles, bias=bias, out_dtype=x.dtype
    )
    return made


def int8_rows(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Rows quantized to int8 at run time by an int8 weight with a scale for each row."""
    p = weight.parts
    codes, scale, zero = QuantizeRows(x)
    sums = p["codes"].sum(1, dtype=torch.int32)
    of_rows = p["scale"].reshape(-1).expand(weight.form.shape[0]).contiguous()
    made: Tensor = Int8Linear(
        codes,
        scale.reshape(-1),
        zero.reshape(-1),
        p["codes"],
        of_rows,
        sums,
        bias=bias,
        out_dtype=x.dtype,
    )
    return made


def sparse_rows(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Float rows by 2:4 semi-sparse weights."""
    p = weight.parts
    of_rows = p["scale"].expand(weight.form.shape[0], -1)
    pairs = pairs_of(p, weight.form)
    made: Tensor = SparseLinear(x, p["values"], pairs, of_rows, bias=bias)
    return made


def fp8_rows(x: Tensor, weight: QuantizedTensor, bias: Tensor | None) -> Tensor:
    """Rows quantized to float8_e4m3fn at run time by a weight of it."""
    p = weight.parts
    codes, scale = QuantizeRowsE4m3(x)
    made: Tensor = Fp8Linear(
        codes, scale.reshape(-1), p["codes"], p["scale"].reshape(-1), bias=bias, out_dtype=x.dtype
    )
    return made


def _is_row_fp8(form: TensorForm) -> bool:
    x = form.input
    return (
        form.scheme.format == FP8_E4M3
        and form.scheme.scales.is_plain
        and x is not None
        and x.format == FP8_E4M3
        and x.is_dynamic
        and isinstance(x.granularity, PerToken)
        and x.scales.is_plain
    )


def _is_int8(form: TensorForm) -> bool:
    return is_per_token(form) and form.scheme.symmetric and form.scheme.scales.is_plain


def _is_sparse(form: TensorForm) -> bool:
    K = form.shape[1]
    is_kept_plain = form.scheme.scales.double_group is None
    return is_kept_plain and takes_groups(K // group_of(form), K)


GPU_KERNELS = (
    TensorKernel(
        name="sparse_linear",
        op="linear",
        layout="sparse_2_4",
        formats=frozenset({"int8", "int4"}),
        granularities=(PerChannel, PerGroup, PerTensor),
        run=sparse_rows,
        device="cuda",
        dtypes=_DTYPES,
        takes=_is_sparse,
    ),
    TensorKernel(
        name="int4_linear",
        op="linear",
        layout="int4_tiles",
        run=int4_rows,
        device="cuda",
        dtypes=_DTYPES,
    ),
    TensorKernel(
        name="a8w4_linear",
        op="linear",
        layout="a8w4_tiles",
        has_input=True,
        run=int8_by_int4,
        device="cuda",
        dtypes=_DTYPES,
        takes=is_per_token,
    ),
    TensorKernel(
        name="int8_linear",
        op="linear",
        formats=frozenset({"int8"}),
        granularities=(PerChannel, PerTensor),
        has_input=True,
        run=int8_rows,
        device="cuda",
        dtypes=_DTYPES,
        takes=_is_int8,
    ),
    TensorKernel(
        name="fp8_linear",
        op="linear",
        formats=frozenset({"float8_e4m3fn"}),
        granularities=(PerChannel, PerTensor),
        has_input=True,
        run=fp8_rows,
        device="cuda",
        dtypes=_DTYPES,
        takes=_is_row_fp8,
    ),
)
