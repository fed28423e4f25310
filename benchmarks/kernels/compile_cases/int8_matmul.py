"""The variants of int8_matmul that are compiled ahead of time."""

from benchmarks.kernels.compile_case import CompileCase
from benchmarks.kernels.compile_cases.swapped_gemm_parts import ENDING

__all__ = ["CASES"]

_TENSORS = {"left": "*i8", "right": "*i8", "bias": "*fp32", "residual": "*i8", "out": "*i8"}
_SIZES = dict.fromkeys(
    (
        "M",
        "N",
        "K",
        "inner_batches",
        "repeats",
        "left_outer",
        "left_inner",
        "left_row",
        "left_depth",
        "right_outer",
        "right_inner",
        "right_depth",
        "right_column",
    ),
    "i32",
)
_END = {
    "scale": "fp32",
    "left_zero_point": "i32",
    "right_zero_point": "i32",
    **ENDING,
}
_SIGNATURE = {**_TENSORS, **_SIZES, **_END}
_IMMA = {80: "IMMA", 89: "IMMA", 90: "IMMA", 100: "IMMA"}
_WGMMA = {**_IMMA, 90: "IGMMA"}
_CLASSES = {
    "decode": _IMMA,
    "skinny": _WGMMA,
    "medium": _WGMMA,
    "large": _WGMMA,
    "large_narrow": _WGMMA,
}
_ALWAYS: dict[str, int | bool | str] = {
    "left_depth": 1,
    "repeats": 1,
    "HAS_BIAS": False,
    "RESIDUAL": "none",
    "ACTIVATION": "none",
}
_VARIANTS: dict[str, dict[str, int | bool | str]] = {
    "transposed right, zero points, bf16": {
        **_ALWAYS,
        "right_depth": 1,
        "HAS_LEFT_ZERO": True,
        "HAS_RIGHT_ZERO": True,
        "IS_INTEGER": False,
    },
    "right as it lies, zero point, int8": {
        **_ALWAYS,
        "right_column": 1,
        "HAS_LEFT_ZERO": True,
        "HAS_RIGHT_ZERO": False,
        "IS_INTEGER": True,
    },
}


def _signature(constants: dict[str, int | bool | str]) -> dict[str, str]:
    out = {} if constants["IS_INTEGER"] else {"out": "*bf16"}
    return {name: t for name, t in {**_SIGNATURE, **out}.items() if name not in constants}


CASES = tuple(
    CompileCase(
        op="int8_matmul",
        kernel="int8_matmul_kernel",
        variant=variant,
        shape_class=shape_class,
        signature=_signature(constants),
        constants=constants,
        aligned=tuple(
            name
            for name in (*_TENSORS, *_SIZES)
            if name not in constants and name not in ("M", "inner_batches")
        ),
        matrix_units=units,
    )
    for variant, constants in _VARIANTS.items()
    for shape_class, units in _CLASSES.items()
)
