"""The variants of int4_linear that are compiled ahead of time."""

from collections.abc import Mapping

from benchmarks.kernels.compile_case import CompileCase
from benchmarks.kernels.compile_cases.swapped_gemm_parts import ENDING, PLAIN_END, add_splits_cases

__all__ = ["CASES"]

_SIGNATURE = {
    "x": "*bf16",
    "weight": "*i32",
    "scale": "*bf16",
    "zero_point": "*u8",
    "bias": "*fp32",
    "residual": "*bf16",
    "out": "*bf16",
    "M": "i32",
    "N": "i32",
    "K": "i32",
    "group_blocks": "i32",
    **ENDING,
}
_ALIGNED = (*list(_SIGNATURE)[:7], "N", "K")
_UNITS = {80: "HMMA", 89: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
_CLASSES = ("decode", "skinny", "medium", "large")

_PLAIN: dict[str, int | bool | str] = {
    "QUARTERS": 4,
    "HAS_ZERO": False,
    "EVEN_K": True,
    "EMULATE": False,
    **PLAIN_END,
}
_FULL = {**_PLAIN, "HAS_ZERO": True, "HAS_BIAS": True, "RESIDUAL": "float", "ACTIVATION": "silu"}
_FP16 = {"x": "*fp16", "scale": "*fp16", "residual": "*fp16", "out": "*fp16"}
_FP32 = {"x": "*fp32", "scale": "*fp32", "residual": "*fp32", "out": "*fp32"}

_VARIANTS: dict[str, tuple[dict[str, str], Mapping[str, int | bool | str], tuple[str, ...]]] = {
    "bf16, symmetric, g128": ({}, _PLAIN, _CLASSES),
    "fp16, zero points, g128, residual, silu": (_FP16, _FULL, _CLASSES),
    "bf16, zero points, g32": ({}, {**_FULL, "QUARTERS": 1}, ("decode", "medium")),
    "fp32, symmetric, g64": (_FP32, {**_PLAIN, "QUARTERS": 2, "EVEN_K": False}, ("decode",)),
}


def _signature(floats: Mapping[str, str], shape_class: str) -> dict[str, str]:
    # Splits of K leave float32 parts.
    parts = {"out": "*fp32"} if shape_class in ("decode", "skinny") else {}
    return {**_SIGNATURE, **floats, **parts}


_PRODUCTS = tuple(
    CompileCase(
        op="int4_linear",
        kernel="int4_linear_kernel",
        variant=variant,
        shape_class=shape_class,
        signature=_signature(floats, shape_class),
        constants=constants,
        aligned=_ALIGNED,
        matrix_units=_UNITS,
        fp_fusion=True,
        packed_weights=("BLOCK_N", "BLOCK_K"),
        # A small group's activations are a tile of 32 k's, which is loaded 8 bytes at a time.
        least_wide=0.6 if constants["QUARTERS"] == 1 else 0.9,
    )
    for variant, (floats, constants, classes) in _VARIANTS.items()
    for shape_class in classes
)

CASES = (*_PRODUCTS, *add_splits_cases("int4_linear", has_scale=False))
