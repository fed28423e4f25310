"""Every unit's cases, listed: what is compiled ahead of time and what a GPU is timed on."""

from typing import Any

from benchmarks.kernels.bench.a8w4_linear import BENCH as A8W4_LINEAR_BENCH
from benchmarks.kernels.bench.embedding_gather import BENCH as EMBEDDING_GATHER_BENCH
from benchmarks.kernels.bench.fp8_linear import BENCH as FP8_LINEAR_BENCH
from benchmarks.kernels.bench.int4_linear import BENCH as INT4_LINEAR_BENCH
from benchmarks.kernels.bench.int8_add import BENCH as INT8_ADD_BENCH
from benchmarks.kernels.bench.int8_cat import BENCH as INT8_CAT_BENCH
from benchmarks.kernels.bench.int8_conv2d import BENCH as INT8_CONV2D_BENCH
from benchmarks.kernels.bench.int8_linear import BENCH as INT8_LINEAR_BENCH
from benchmarks.kernels.bench.int8_matmul import BENCH as INT8_MATMUL_BENCH
from benchmarks.kernels.bench.int8_pool import BENCH as INT8_POOL_BENCH
from benchmarks.kernels.bench.norm_quantize import BENCH as NORM_QUANTIZE_BENCH
from benchmarks.kernels.bench.norm_quantize import E4M3_BENCH as NORM_QUANTIZE_E4M3_BENCH
from benchmarks.kernels.bench.quantize import BENCH as QUANTIZE_BENCH
from benchmarks.kernels.bench.quantize import E4M3_BENCH as QUANTIZE_E4M3_BENCH
from benchmarks.kernels.bench.quantize import PIXELS_BENCH as QUANTIZE_PIXELS_BENCH
from benchmarks.kernels.bench.quantize_per_tensor import BENCH as QUANTIZE_PER_TENSOR_BENCH
from benchmarks.kernels.bench.quantize_per_tensor import (
    E4M3_BENCH as QUANTIZE_PER_TENSOR_E4M3_BENCH,
)
from benchmarks.kernels.bench.quantize_per_token import BENCH as QUANTIZE_PER_TOKEN_BENCH
from benchmarks.kernels.bench.quantize_per_token import E4M3_BENCH as QUANTIZE_PER_TOKEN_E4M3_BENCH
from benchmarks.kernels.bench.softmax_quantize import BENCH as SOFTMAX_QUANTIZE_BENCH
from benchmarks.kernels.bench.sparse_linear import BENCH as SPARSE_LINEAR_BENCH
from benchmarks.kernels.bench_case import Bench
from benchmarks.kernels.compile_case import CompileCase
from benchmarks.kernels.compile_cases.a8w4_linear import CASES as A8W4_LINEAR
from benchmarks.kernels.compile_cases.embedding_gather import CASES as EMBEDDING_GATHER
from benchmarks.kernels.compile_cases.fp8_linear import CASES as FP8_LINEAR
from benchmarks.kernels.compile_cases.int4_linear import CASES as INT4_LINEAR
from benchmarks.kernels.compile_cases.int8_add import CASES as INT8_ADD
from benchmarks.kernels.compile_cases.int8_cat import CASES as INT8_CAT
from benchmarks.kernels.compile_cases.int8_conv2d import CASES as INT8_CONV2D
from benchmarks.kernels.compile_cases.int8_linear import CASES as INT8_LINEAR
from benchmarks.kernels.compile_cases.int8_matmul import CASES as INT8_MATMUL
from benchmarks.kernels.compile_cases.int8_pool import CASES as INT8_POOL
from benchmarks.kernels.compile_cases.norm_quantize import CASES as NORM_QUANTIZE
from benchmarks.kernels.compile_cases.quantize import CASES as QUANTIZE
from benchmarks.kernels.compile_cases.quantize_per_tensor import CASES as QUANTIZE_PER_TENSOR
from benchmarks.kernels.compile_cases.quantize_per_token import CASES as QUANTIZE_PER_TOKEN
from benchmarks.kernels.compile_cases.softmax_quantize import CASES as SOFTMAX_QUANTIZE
from benchmarks.kernels.compile_cases.sparse_linear import CASES as SPARSE_LINEAR

__all__ = ["BENCHES", "COMPILE_CASES"]

COMPILE_CASES: tuple[CompileCase, ...] = (
    *INT8_LINEAR,
    *INT8_CONV2D,
    *INT8_MATMUL,
    *INT4_LINEAR,
    *A8W4_LINEAR,
    *FP8_LINEAR,
    *SPARSE_LINEAR,
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
    SPARSE_LINEAR_BENCH,
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
