"""The variants of fp8_linear that are compiled ahead of time."""

from pt2e_quant.kernels.compile_case import CompileCase
from pt2e_quant.kernels.swapped_gemm.compile_parts import ENDING, PLAIN_END, add_splits_cases

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
_VARIANTS: dict[str, tuple[str, dict[str, bool | str]]] = {
    "per token, bf16": ("*bf16", _PLAIN),
    "static, bias, residual, gelu, fp16": ("*fp16", _FULL),
}


def _signature(floats: str, shape_class: str) -> dict[str, str]:
    # Splits of K leave float32 parts.
    parts = shape_class in ("decode", "skinny")
    return {**_SIGNATURE, "residual": floats, "out": "*fp32" if parts else floats}


_PRODUCTS = tuple(
    CompileCase(
        op="fp8_linear",
        kernel="fp8_linear_kernel",
        variant=variant,
        shape_class=shape_class,
        signature=_signature(floats, shape_class),
        constants=constants,
        aligned=_ALIGNED,
        matrix_units=_UNITS,
        fp_fusion=True,
        lowest_capability=89,
    )
    for variant, (floats, constants) in _VARIANTS.items()
    for shape_class in ("decode", "skinny", "medium", "large")
)

CASES = (*_PRODUCTS, *add_splits_cases("fp8_linear", has_scale=True))
