"""The variants of int8_pool that are compiled ahead of time."""

from benchmarks.kernels.compile_case import CompileCase

__all__ = ["CASES"]

_SIZES = ("P", "C", "H", "W", "OH", "OW", "kernel_h", "kernel_w")
_SIGNATURE = {
    "x": "*i8",
    "out": "*i8",
    **dict.fromkeys(_SIZES, "i32"),
    **dict.fromkeys(("stride_h", "stride_w", "padding_h", "padding_w", "divisor"), "i32"),
    "x_scale": "fp32",
    "x_zero_point": "i32",
    "act_low": "fp32",
    "act_high": "fp32",
    "out_scaling": "fp32",
    "out_zero_point": "i32",
    "out_min": "i32",
    "out_max": "i32",
}

CASES = tuple(
    CompileCase(
        op="int8_pool",
        kernel="int8_pool_kernel",
        variant=kind,
        shape_class=shape_class,
        signature=_SIGNATURE,
        constants={
            "KIND": kind,
            "COUNTS_PADDING": True,
            "HAS_DIVISOR": False,
            "ACTIVATION": "none",
            "IS_INTEGER": True,
        },
        aligned=("x", "out", "C"),
        matrix_units={},
    )
    for kind, shape_class in (("max", "window"), ("average", "window"), ("adaptive", "global"))
)
