"""The variants of sparse_linear that are compiled ahead of time."""

from collections.abc import Mapping

from benchmarks.kernels.compile_case import CompileCase
from benchmarks.kernels.compile_cases.swapped_gemm_parts import ENDING, PLAIN_END, add_splits_cases

__all__ = ["CASES"]

_SIGNATURE = {
    "x": "*bf16",
    "values": "*i8",
    "pairs": "*u8",
    "scale": "*fp32",
    "bias": "*bf16",
    "residual": "*bf16",
    "out": "*bf16",
    "M": "i32",
    "N": "i32",
    "K": "i32",
    "groups": "i32",
    "pair_bytes": "i32",
    **ENDING,
}
_ALIGNED = (*list(_SIGNATURE)[:7], "N", "K")
_UNITS = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
_PLAIN: dict[str, int | bool | str] = {
    "IS_BYTE": True,
    "HAS_GROUPS": False,
    "EMULATE": False,
    **PLAIN_END,
}
_FP16 = {"x": "*fp16", "bias": "*fp16", "residual": "*fp16", "out": "*fp16"}
_FP32 = {"x": "*fp32", "bias": "*fp32", "residual": "*fp32", "out": "*fp32"}
_INT4 = {"values": "*u8"}

_VARIANTS: dict[str, tuple[dict[str, str], Mapping[str, int | bool | str], tuple[str, ...]]] = {
    "bf16, int8": ({}, _PLAIN, ("decode", "skinny", "medium", "large")),
    "fp16, int4 in groups, bias": (
        _FP16 | _INT4,
        {**_PLAIN, "IS_BYTE": False, "HAS_GROUPS": True, "HAS_BIAS": True},
        ("decode", "medium"),
    ),
    "fp32, int8": (_FP32, _PLAIN, ("decode",)),
}


def _signature(kinds: Mapping[str, str], shape_class: str) -> dict[str, str]:
    # Splits of K leave float32 parts.
    parts = {"out": "*fp32"} if shape_class in ("decode", "skinny") else {}
    return {**_SIGNATURE, **kinds, **parts}


_PRODUCTS = tuple(
    CompileCase(
        op="sparse_linear",
        kernel="sparse_linear_kernel",
        variant=variant,
        shape_class=shape_class,
        signature=_signature(kinds, shape_class),
        constants=constants,
        aligned=_ALIGNED,
        matrix_units=_UNITS,
        fp_fusion=True,
        packed_weights=("BLOCK_N", "BLOCK_K"),
        # Three bits a pair are loaded byte by byte, from lines that a wider load has fetched.
        least_wide=0.0,
    )
    for variant, (kinds, constants, classes) in _VARIANTS.items()
    for shape_class in classes
)

CASES = (*_PRODUCTS, *add_splits_cases("sparse_linear", has_scale=False))
