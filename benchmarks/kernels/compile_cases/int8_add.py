"""The variants of int8_add that are compiled ahead of time."""

from benchmarks.kernels.compile_case import CompileCase

__all__ = ["CASES"]

_SIZES = ("size", "middle", "inner")
_STEPS = tuple(f"{name}_{dim}" for name in "xy" for dim in ("outer", "middle", "inner"))
_SIGNATURE = {
    **dict.fromkeys(("x", "y", "out"), "*i8"),
    **dict.fromkeys((*_SIZES, *_STEPS), "i32"),
    "x_scale": "fp32",
    "x_zero_point": "i32",
    "y_scale": "fp32",
    "y_zero_point": "i32",
    "act_low": "fp32",
    "act_high": "fp32",
    "out_scaling": "fp32",
    "out_zero_point": "i32",
    "out_min": "i32",
    "out_max": "i32",
}
_COMMON: dict[str, bool | str] = {
    "X_INTEGER": True,
    "X_FLAT": True,
    "IS_LONG": False,
    "IS_INTEGER": True,
}
_VARIANTS: dict[str, tuple[dict[str, str], dict[str, bool | str]]] = {
    "two int8, relu": (
        {},
        {"COMBINE": "add", "Y_INTEGER": True, "Y_FLAT": True, "ACTIVATION": "relu"},
    ),
    "int8 times broadcast bf16": (
        {"y": "*bf16"},
        {"COMBINE": "mul", "Y_INTEGER": False, "Y_FLAT": False, "ACTIVATION": "none"},
    ),
}

CASES = tuple(
    CompileCase(
        op="int8_add",
        kernel="int8_add_kernel",
        variant=variant,
        shape_class=shape_class,
        signature={**_SIGNATURE, **types},
        constants={**_COMMON, **constants},
        aligned=("x", "y", "out", "size"),
        matrix_units={},
    )
    for variant, (types, constants) in _VARIANTS.items()
    for shape_class in ("small", "large")
)
