"""The variants of quantize that are compiled ahead of time."""

from benchmarks.kernels.compile_case import CompileCase

__all__ = ["CASES"]

_STEPS = {
    "out_scaling": "fp32",
    "out_zero_point": "i32",
    "out_min": "i32",
    "out_max": "i32",
}
_SIGNATURE = {
    "x": "*bf16",
    "out": "*i8",
    "size": "i32",
    "x_scale": "fp32",
    "x_zero_point": "i32",
    "act_low": "fp32",
    "act_high": "fp32",
    **_STEPS,
}
_VARIANTS: dict[str, tuple[dict[str, str], dict[str, bool | str]]] = {
    "bf16 to int8": ({}, {"FROM_INTEGER": False, "ACTIVATION": "none", "IS_INTEGER": True}),
    "bf16, gelu, int8": ({}, {"FROM_INTEGER": False, "ACTIVATION": "gelu", "IS_INTEGER": True}),
    "int8, silu, int8": (
        {"x": "*i8"},
        {"FROM_INTEGER": True, "ACTIVATION": "silu", "IS_INTEGER": True},
    ),
    "bf16, gelu, e4m3": (
        {"out": "*fp8e4nv"},
        {"FROM_INTEGER": False, "ACTIVATION": "gelu", "IS_INTEGER": False},
    ),
    "bf16 to e4m3": (
        {"out": "*fp8e4nv"},
        {"FROM_INTEGER": False, "ACTIVATION": "none", "IS_INTEGER": False},
    ),
    "int8 to bf16": (
        {"x": "*i8", "out": "*bf16"},
        {"FROM_INTEGER": True, "ACTIVATION": "none", "IS_INTEGER": False},
    ),
}

_WHOLE = tuple(
    CompileCase(
        op="quantize",
        kernel="quantize_kernel",
        variant=variant,
        shape_class=shape_class,
        signature={**_SIGNATURE, **types},
        constants=constants,
        aligned=("x", "out", "size"),
        matrix_units={},
        lowest_capability=89 if types.get("out") == "*fp8e4nv" else 80,
    )
    for variant, (types, constants) in _VARIANTS.items()
    for shape_class in ("small", "large")
)
_PIXELS = tuple(
    CompileCase(
        op="quantize",
        kernel="quantize_pixels_kernel",
        variant=f"3 channels, {kind}",
        shape_class=shape_class,
        signature={"x": f"*{kind}", "out": "*i32", "area": "i32", **_STEPS},
        constants={"CHANNELS": 3, "IS_PLANAR": True, "WIDTH": 4},
        aligned=("x", "out", "area"),
        matrix_units={},
    )
    for kind in ("fp32", "bf16")
    for shape_class in ("small", "large")
)

CASES = (*_WHOLE, *_PIXELS)
