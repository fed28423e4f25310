"""The variants of norm_quantize that are compiled ahead of time."""

from benchmarks.kernels.compile_case import CompileCase

__all__ = ["CASES"]

_SIGNATURE = {
    "x": "*bf16",
    "weight": "*bf16",
    "bias": "*bf16",
    "out": "*i8",
    "scale": "*fp32",
    "zero_point": "*i32",
    "M": "i32",
    "K": "i32",
    "eps": "fp32",
    "out_scaling": "fp32",
    "out_zero_point": "i32",
    "out_min": "i32",
    "out_max": "i32",
}
_LAYER: dict[str, bool | str] = {"KIND": "layer", "HAS_BIAS": True, "ROUNDS_FIRST": False}
_RMS: dict[str, bool | str] = {"KIND": "rms", "HAS_BIAS": False, "ROUNDS_FIRST": True}
_VARIANTS: dict[str, dict[str, bool | str]] = {
    "layer, static": {**_LAYER, "PER_TOKEN": False, "IS_E4M3": False},
    "rms, per token": {**_RMS, "PER_TOKEN": True, "IS_E4M3": False},
    "layer, static, e4m3": {**_LAYER, "PER_TOKEN": False, "IS_E4M3": True},
    "rms, per token, e4m3": {**_RMS, "PER_TOKEN": True, "IS_E4M3": True},
}

CASES = tuple(
    CompileCase(
        op="norm_quantize",
        kernel="norm_quantize_kernel",
        variant=variant,
        shape_class=shape_class,
        signature={**_SIGNATURE, "out": "*fp8e4nv" if constants["IS_E4M3"] else "*i8"},
        constants={"HAS_WEIGHT": True, "PRECISION": "bf16", **constants},
        aligned=("x", "weight", "bias", "out", "scale", "zero_point", "K"),
        matrix_units={},
        lowest_capability=89 if constants["IS_E4M3"] else 80,
    )
    for variant, constants in _VARIANTS.items()
    for shape_class in ("narrow", "row", "wide", "long")
)
