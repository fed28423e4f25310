"""The variants of quantize_per_tensor that are compiled ahead of time."""

from benchmarks.kernels.compile_case import CompileCase

__all__ = ["CASES"]

_SIZES = {"size": "i32", "turns": "i32"}
_RANGE = {"quant_min": "i32", "quant_max": "i32", "eps": "fp32"}
_TYPES = {
    "bf16": {"x": "*bf16", "out": "*i8", "partials": "*fp32"},
    "fp32": {"x": "*fp32", "out": "*i8", "partials": "*fp32"},
    "bf16 to e4m3": {"x": "*bf16", "out": "*fp8e4nv", "partials": "*i32"},
}


def _is_e4m3(variant: str) -> bool:
    return variant.endswith("e4m3")


_RANGES = tuple(
    CompileCase(
        op="quantize_per_tensor",
        kernel="partial_ranges_kernel",
        variant=variant,
        shape_class=shape_class,
        signature={"x": types["x"], "partials": types["partials"], **_SIZES},
        constants={"IS_E4M3": _is_e4m3(variant)},
        aligned=("x", "partials", "size"),
        matrix_units={},
    )
    for variant, types in _TYPES.items()
    for shape_class in ("small", "large")
)


def _quantize(variant: str, shape_class: str) -> CompileCase:
    types, in_one = _TYPES[variant], shape_class == "one"
    precision = types["x"].removeprefix("*")
    signature = {
        **types,
        "scale": "*fp32",
        "zero_point": "*i32",
        **_SIZES,
        "count": "i32",
        **_RANGE,
    }
    constants: dict[str, int | bool | str] = {
        "PRECISION": precision,
        "SYMMETRIC": _is_e4m3(variant),
        "IS_E4M3": _is_e4m3(variant),
        "IN_ONE": in_one,
    }
    return CompileCase(
        op="quantize_per_tensor",
        kernel="quantize_tensor_kernel",
        variant=variant,
        shape_class=shape_class,
        signature=signature,
        constants=constants,
        aligned=("x", "out", "scale", "zero_point", "partials", "size"),
        matrix_units={},
        lowest_capability=89 if _is_e4m3(variant) else 80,
    )


CASES = (
    *_RANGES,
    *(_quantize(variant, name) for variant in _TYPES for name in ("one", "small", "large")),
)
