"""The variants of quantize_per_token that are compiled ahead of time."""

from pt2e_quant.kernels.compile_case import CompileCase

__all__ = ["CASES"]

_SIGNATURE = {
    "x": "*bf16",
    "integers": "*i8",
    "scale": "*fp32",
    "zero_point": "*i32",
    "M": "i32",
    "K": "i32",
    "quant_min": "i32",
    "quant_max": "i32",
}

CASES = tuple(
    CompileCase(
        op="quantize_per_token",
        kernel="quantize_per_token_kernel",
        variant=precision,
        shape_class=shape_class,
        signature={**_SIGNATURE, "x": f"*{precision}"},
        constants={"PRECISION": precision, "IN_ONE": shape_class != "long"},
        aligned=("x", "integers", "scale", "zero_point", "K"),
        matrix_units={},
    )
    for precision in ("bf16", "fp32")
    for shape_class in ("narrow", "row", "wide", "long")
)
