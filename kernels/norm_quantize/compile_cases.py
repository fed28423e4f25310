"""The variants of norm_quantize that are compiled ahead of time."""

from pt2e_quant.kernels.compile_case import CompileCase

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
    "inverse_scale": "fp32",
    "out_zero_point": "i32",
    "out_min": "i32",
    "out_max": "i32",
}
_VARIANTS: dict[str, dict[str, bool | str]] = {
    "layer, static": {"KIND": "layer", "HAS_BIAS": True, "ROUNDS_FIRST": False, "PER_TOKEN": False},
    "rms, per token": {"KIND": "rms", "HAS_BIAS": False, "ROUNDS_FIRST": True, "PER_TOKEN": True},
}

CASES = tuple(
    CompileCase(
        op="norm_quantize",
        kernel="norm_quantize_kernel",
        variant=variant,
        shape_class=shape_class,
        signature=_SIGNATURE,
        constants={"HAS_WEIGHT": True, "PRECISION": "bf16", **constants},
        aligned=("x", "weight", "bias", "out", "scale", "zero_point", "K"),
        matrix_units={},
    )
    for variant, constants in _VARIANTS.items()
    for shape_class in ("narrow", "row", "wide", "long")
)
