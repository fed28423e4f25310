"""The variants of fp8_linear that are compiled ahead of time."""

from benchmarks.kernels.compile_case import CompileCase
from benchmarks.kernels.compile_cases.swapped_gemm_parts import ENDING, PLAIN_END, add_splits_cases

__all__ = ["CASES"]

_SIGNATURE = {
    "x": "*fp8e4nv",
    "x_scale": "*fp32",
    "weight": "*fp8e4nv",
    "weight_scale": "*fp32",
    "bias": "*fp32",
    "residual": "*bf16",
    "out": "*bf16",
    "M": "i32",
    "N": "i32",
    "K": "i32",
    **ENDING,
}
_ALIGNED = (*list(_SIGNATURE)[:7], "N", "K")
_UNITS = {89: "QMMA", 90: "QGMMA", 100: "UTCQMMA"}
_PLAIN: dict[str, bool | str] = {
    "PER_ROW": True,
    "PER_CHANNEL": True,
    "EMULATE": False,
    **PLAIN_END,
}
_FULL = {**_PLAIN, "PER_ROW": False, "HAS_BIAS": True, "RESIDUAL": "float", "ACTIVATION": "gelu"}
_TO_E4M3 = {**_FULL, "RESIDUAL": "none"}
_SPLIT = ("decode", "skinny")
_WHOLE = ("medium", "large")
_VARIANTS: dict[str, tuple[str, dict[str, bool | str], tuple[str, ...]]] = {
    "per token, bf16": ("*bf16", _PLAIN, (*_SPLIT, *_WHOLE)),
    "static, bias, residual, gelu, fp16": ("*fp16", _FULL, (*_SPLIT, *_WHOLE)),
    "static, bias, gelu, e4m3": ("*fp8e4nv", _TO_E4M3, _WHOLE),
}


def _signature(out: str, shape_class: str) -> dict[str, str]:
    residual = "*bf16" if out == "*fp8e4nv" else out
    # Splits of K leave float32 parts.
    return {**_SIGNATURE, "residual": residual, "out": "*fp32" if shape_class in _SPLIT else out}


_PRODUCTS = tuple(
    CompileCase(
        op="fp8_linear",
        kernel="fp8_linear_kernel",
        variant=variant,
        shape_class=shape_class,
        signature=_signature(out, shape_class),
        constants=constants,
        aligned=_ALIGNED,
        matrix_units=_UNITS,
        fp_fusion=True,
        lowest_capability=89,
    )
    for variant, (out, constants, classes) in _VARIANTS.items()
    for shape_class in classes
)

CASES = (*_PRODUCTS, *add_splits_cases("fp8_linear", has_scale=True, to_e4m3=True))
