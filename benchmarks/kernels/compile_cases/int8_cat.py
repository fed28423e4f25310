"""The variants of int8_cat that are compiled ahead of time."""

from benchmarks.kernels.compile_case import CompileCase

__all__ = ["CASES"]

_SIGNATURE = {
    **{f"x_{i}": "*i8" for i in range(4)},
    "out": "*i8",
    **dict.fromkeys(("M", "total", "first", "end"), "i32"),
    **{f"width_{i}": "i32" for i in range(4)},
    **{f"scale_{i}": "fp32" for i in range(4)},
    **{f"zero_{i}": "i32" for i in range(4)},
    "act_low": "fp32",
    "act_high": "fp32",
    "out_scaling": "fp32",
    "out_zero_point": "i32",
    "out_min": "i32",
    "out_max": "i32",
}

CASES = tuple(
    CompileCase(
        op="int8_cat",
        kernel="int8_cat_kernel",
        variant=f"{count} tensors",
        shape_class=shape_class,
        signature=_SIGNATURE,
        constants={
            "COUNT": count,
            "FROM_INTEGER": True,
            "ACTIVATION": "none",
            "IS_INTEGER": True,
        },
        aligned=(
            *(f"x_{i}" for i in range(4)),
            *(f"width_{i}" for i in range(4)),
            "out",
            "total",
            "first",
            "end",
        ),
        matrix_units={},
    )
    for count in (2, 4)
    for shape_class in ("narrow", "row", "wide", "long")
)
