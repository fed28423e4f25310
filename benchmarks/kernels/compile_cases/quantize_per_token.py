"""The variants of quantize_per_token that are compiled ahead of time."""

from benchmarks.kernels.compile_case import CompileCase

__all__ = ["CASES"]

_CLASSES = ("narrow", "row", "wide", "long")
_SIGNATURE = {
    "x": "*bf16",
    "out": "*i8",
    "scale": "*fp32",
    "zero_point": "*i32",
    "M": "i32",
    "K": "i32",
    "quant_min": "i32",
    "quant_max": "i32",
}

_TO_INT8 = tuple(
    CompileCase(
        op="quantize_per_token",
        kernel="quantize_per_token_kernel",
        variant=precision,
        shape_class=shape_class,
        signature={**_SIGNATURE, "x": f"*{precision}"},
        constants={
            "PRECISION": precision,
            "IS_E4M3": False,
            "IN_ONE": shape_class != "long",
        },
        aligned=("x", "out", "scale", "zero_point", "K"),
        matrix_units={},
    )
    for precision in ("bf16", "fp32")
    for shape_class in _CLASSES
)
_TO_E4M3 = tuple(
    CompileCase(
        op="quantize_per_token",
        kernel="quantize_per_token_kernel",
        variant="bf16 to e4m3",
        shape_class=shape_class,
        signature={**_SIGNATURE, "out": "*fp8e4nv"},
        constants={"PRECISION": "bf16", "IS_E4M3": True, "IN_ONE": shape_class != "long"},
        aligned=("x", "out", "scale", "zero_point", "K"),
        matrix_units={},
        lowest_capability=89,
    )
    for shape_class in _CLASSES
)

CASES = (*_TO_INT8, *_TO_E4M3)
