"""Every unit's cases, listed: what is compiled ahead of time and what a GPU is timed on."""

from typing import Any

from pt2e_quant.kernels.a8w4_linear.bench import BENCH as A8W4_LINEAR_BENCH
from pt2e_quant.kernels.a8w4_linear.compile_cases import CASES as A8W4_LINEAR
from pt2e_quant.kernels.bench_case import Bench
from pt2e_quant.kernels.compile_case import CompileCase
from pt2e_quant.kernels.embedding_gather.bench import BENCH as EMBEDDING_GATHER_BENCH
from pt2e_quant.kernels.embedding_gather.compile_cases import CASES as EMBEDDING_GATHER
from pt2e_quant.kernels.fp8_linear.bench import BENCH as FP8_LINEAR_BENCH
from pt2e_quant.kernels.fp8_linear.compile_cases import CASES as FP8_LINEAR
from pt2e_quant.kernels.int4_linear.bench import BENCH as INT4_LINEAR_BENCH
from pt2e_quant.kernels.int4_linear.compile_cases import CASES as INT4_LINEAR
from pt2e_quant.kernels.int8_add.bench import BENCH as INT8_ADD_BENCH
from pt2e_quant.kernels.int8_add.compile_cases import CASES as INT8_ADD
from pt2e_quant.kernels.int8_cat.bench import BENCH as INT8_CAT_BENCH
from pt2e_quant.kernels.int8_cat.compile_cases import CASES as INT8_CAT
from pt2e_quant.kernels.int8_conv2d.bench import BENCH as INT8_CONV2D_BENCH
from pt2e_quant.kernels.int8_conv2d.compile_cases import CASES as INT8_CONV2D
from pt2e_quant.kernels.int8_linear.bench import BENCH as INT8_LINEAR_BENCH
from pt2e_quant.kernels.int8_linear.compile_cases import CASES as INT8_LINEAR
from pt2e_quant.kernels.int8_matmul.bench import BENCH as INT8_MATMUL_BENCH
from pt2e_quant.kernels.int8_matmul.compile_cases import CASES as INT8_MATMUL
from pt2e_quant.kernels.int8_pool.bench import BENCH as INT8_POOL_BENCH
from pt2e_quant.kernels.int8_pool.compile_cases import CASES as INT8_POOL
from pt2e_quant.kernels.norm_quantize.bench import BENCH as NORM_QUANTIZE_BENCH
from pt2e_quant.kernels.norm_quantize.bench import E4M3_BENCH as NORM_QUANTIZE_E4M3_BENCH
from pt2e_quant.kernels.norm_quantize.compile_cases import CASES as NORM_QUANTIZE
from pt2e_quant.kernels.quantize.bench import BENCH as QUANTIZE_BENCH
from pt2e_quant.kernels.quantize.bench import E4M3_BENCH as QUANTIZE_E4M3_BENCH
from pt2e_quant.kernels.quantize.bench import PIXELS_BENCH as QUANTIZE_PIXELS_BENCH
from pt2e_quant.kernels.quantize.compile_cases import CASES as QUANTIZE
from pt2e_quant.kernels.quantize_per_tensor.bench import BENCH as QUANTIZE_PER_TENSOR_BENCH
from pt2e_quant.kernels.quantize_per_tensor.bench import (
    E4M3_BENCH as QUANTIZE_PER_TENSOR_E4M3_BENCH,
)
from pt2e_quant.kernels.quantize_per_tensor.compile_cases import CASES as QUANTIZE_PER_TENSOR
from pt2e_quant.kernels.quantize_per_token.bench import BENCH as QUANTIZE_PER_TOKEN_BENCH
from pt2e_quant.kernels.quantize_per_token.bench import E4M3_BENCH as QUANTIZE_PER_TOKEN_E4M3_BENCH
from pt2e_quant.kernels.quantize_per_token.compile_cases import CASES as QUANTIZE_PER_TOKEN
from pt2e_quant.kernels.softmax_quantize.bench import BENCH as SOFTMAX_QUANTIZE_BENCH
from pt2e_quant.kernels.softmax_quantize.compile_cases import CASES as SOFTMAX_QUANTIZE

__all__ = ["BENCHES", "COMPILE_CASES"]

COMPILE_CASES: tuple[CompileCase, ...] = (
    *INT8_LINEAR,
    *INT8_CONV2D,
    *INT8_MATMUL,
    *INT4_LINEAR,
    *A8W4_LINEAR,
    *FP8_LINEAR,
    *QUANTIZE_PER_TOKEN,
    *QUANTIZE_PER_TENSOR,
    *QUANTIZE,
    *INT8_ADD,
    *NORM_QUANTIZE,
    *SOFTMAX_QUANTIZE,
    *EMBEDDING_GATHER,
    *INT8_CAT,
    *INT8_POOL,
)

BENCHES: tuple[Bench[Any], ...] = (
    INT8_LINEAR_BENCH,
    INT8_CONV2D_BENCH,
    INT8_MATMUL_BENCH,
    INT4_LINEAR_BENCH,
    A8W4_LINEAR_BENCH,
    FP8_LINEAR_BENCH,
    QUANTIZE_PER_TOKEN_BENCH,
    QUANTIZE_PER_TOKEN_E4M3_BENCH,
    QUANTIZE_PER_TENSOR_BENCH,
    QUANTIZE_PER_TENSOR_E4M3_BENCH,
    QUANTIZE_BENCH,
    QUANTIZE_E4M3_BENCH,
    QUANTIZE_PIXELS_BENCH,
    INT8_ADD_BENCH,
    NORM_QUANTIZE_BENCH,
    NORM_QUANTIZE_E4M3_BENCH,
    SOFTMAX_QUANTIZE_BENCH,
    EMBEDDING_GATHER_BENCH,
    INT8_CAT_BENCH,
    INT8_POOL_BENCH,
)
