"""The variants of int8_linear that are compiled ahead of time."""

from collections.abc import Mapping

from benchmarks.kernels.compile_case import CompileCase
from benchmarks.kernels.compile_cases.swapped_gemm_parts import ENDING

__all__ = ["CASES"]

_SIGNATURE = {
    "x": "*i8",
    "x_scale": "*fp32",
    "x_zero_point": "*i32",
    "weight": "*i8",
    "weight_scale": "*fp32",
    "weight_sum": "*i32",
    "bias": "*fp32",
    "residual": "*i8",
    "out": "*i8",
    "partial": "*i32",
    "M": "i32",
    "N": "i32",
    "K": "i32",
    **ENDING,
}
_ALIGNED = (*list(_SIGNATURE)[:10], "N", "K")
_IMMA = {80: "IMMA", 89: "IMMA", 90: "IMMA", 100: "IMMA"}
# wgmma needs 64 rows; Triton 3.7 has no int8 form of Blackwell's tcgen05.
_WGMMA = {**_IMMA, 90: "IGMMA"}
_CLASSES = {
    "decode": _IMMA,
    "decode_narrow": _IMMA,
    "skinny": _WGMMA,
    "medium": _WGMMA,
    "large": _WGMMA,
}
_VARIANTS: dict[str, dict[str, bool | str]] = {
    "static, relu, int8": {
        "PER_ROW": False,
        "HAS_BIAS": True,
        "RESIDUAL": "none",
        "ACTIVATION": "relu",
        "IS_INTEGER": True,
    },
    "per token, gelu, residual, bf16": {
        "PER_ROW": True,
        "HAS_BIAS": True,
        "RESIDUAL": "float",
        "ACTIVATION": "gelu",
        "IS_INTEGER": False,
    },
}


_OF_PRODUCTS = ("x", "weight", "M", "K")


def _signature(constants: Mapping[str, bool | str]) -> dict[str, str]:
    floats = {} if constants["IS_INTEGER"] else {"out": "*bf16", "residual": "*bf16"}
    return {**_SIGNATURE, **floats}


_PRODUCTS = tuple(
    CompileCase(
        op="int8_linear",
        kernel="int8_linear_kernel",
        variant=variant,
        shape_class=shape_class,
        signature=_signature(constants),
        constants=constants,
        aligned=_ALIGNED,
        matrix_units=units,
    )
    for variant, constants in _VARIANTS.items()
    for shape_class, units in _CLASSES.items()
)
_ADDS = tuple(
    CompileCase(
        op="int8_linear",
        kernel="add_integer_splits_kernel",
        variant=variant,
        shape_class="add_splits",
        signature={
            **{n: t for n, t in _signature(constants).items() if n not in _OF_PRODUCTS},
            "SPLITS": "i32",
            "size": "i32",
        },
        constants=constants,
        aligned=(*(n for n in _ALIGNED if n not in _OF_PRODUCTS), "size"),
        matrix_units={},
    )
    for variant, constants in _VARIANTS.items()
)

CASES = (*_PRODUCTS, *_ADDS)
