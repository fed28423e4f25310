"""The variants of a8w4_linear that are compiled ahead of time."""

from benchmarks.kernels.compile_case import CompileCase
from benchmarks.kernels.compile_cases.swapped_gemm_parts import ENDING, PLAIN_END, add_splits_cases

__all__ = ["CASES"]

_SIGNATURE = {
    "x": "*i8",
    "x_scale": "*fp32",
    "x_zero_point": "*i32",
    "weight": "*i8",
    "weight_scale": "*fp32",
    "weight_sum": "*fp32",
    "bias": "*fp32",
    "residual": "*bf16",
    "out": "*bf16",
    "M": "i32",
    "N": "i32",
    "K": "i32",
    "group_runs": "i32",
    "scale_stride": "i32",
    **ENDING,
}
_ALIGNED = (*list(_SIGNATURE)[:9], "N", "K", "scale_stride")
# Triton 3.7 has no int8 form of Blackwell's tcgen05.
_UNITS = {80: "IMMA", 89: "IMMA", 90: "IGMMA", 100: "IMMA"}
_PLAIN: dict[str, int | bool | str] = {
    "HALF": 64,
    "TWO_RUNS": False,
    "LONG_GROUPS": False,
    "AS_BITS": True,
    "PER_ROW": True,
    "EVEN_K": True,
    "EMULATE": False,
    **PLAIN_END,
}
_FULL = {**_PLAIN, "HAS_BIAS": True, "RESIDUAL": "float", "ACTIVATION": "silu"}
_G64, _G32 = {"TWO_RUNS": True}, {"TWO_RUNS": True, "HALF": 32}
# Weights are loaded 16 bytes at a time; beside them lie activations of 16 or 32 rows, which are 8
# bytes a thread in blocks of 64 k's, and 4 or 8 in those of 32.
_LEAST_WIDE = {"g128": 0.75, "g64": 0.7, "g32": 0.3}
_VARIANTS: dict[str, tuple[str, dict[str, int | bool | str], tuple[str, ...]]] = {
    "g128, bf16": ("*bf16", _PLAIN, ("decode", "slim", "skinny", "medium", "large")),
    "g64, bf16": ("*bf16", {**_PLAIN, **_G64}, ("slim", "skinny")),
    "g32, bf16": ("*bf16", {**_PLAIN, **_G32}, ("decode", "slim", "skinny")),
    "g64, fp16, residual, silu": ("*fp16", {**_FULL, **_G64}, ("decode", "medium", "large")),
    "g32, ragged K, fp16": ("*fp16", {**_PLAIN, **_G32, "EVEN_K": False}, ("skinny",)),
}


def _signature(floats: str, shape_class: str) -> dict[str, str]:
    # Splits of K leave float32 parts.
    parts = shape_class in ("decode", "slim", "skinny")
    named = {"residual": floats, "weight_scale": floats, "out": "*fp32" if parts else floats}
    return {**_SIGNATURE, **named}


_PRODUCTS = tuple(
    CompileCase(
        op="a8w4_linear",
        kernel="a8w4_linear_kernel",
        variant=variant,
        shape_class=shape_class,
        signature=_signature(floats, shape_class),
        constants=constants,
        constants_on={90: {"AS_BITS": False}},
        aligned=_ALIGNED,
        matrix_units=_UNITS,
        packed_weights=("BLOCK_N", "BLOCK_K"),
        least_wide=_LEAST_WIDE[variant.partition(",")[0]],
    )
    for variant, (floats, constants, classes) in _VARIANTS.items()
    for shape_class in classes
)

CASES = (*_PRODUCTS, *add_splits_cases("a8w4_linear", has_scale=True))
