"""The variants of softmax_quantize that are compiled ahead of time."""

from benchmarks.kernels.compile_case import CompileCase

__all__ = ["CASES"]

_SIGNATURE = {
    "x": "*bf16",
    "mask": "*bf16",
    "out": "*i8",
    **dict.fromkeys(("M", "K", "heads", "queries"), "i32"),
    **dict.fromkeys(("mask_image", "mask_head", "mask_query"), "i32"),
    "scale": "fp32",
    "inverse_scale": "fp32",
    "out_zero_point": "i32",
    "out_min": "i32",
    "out_max": "i32",
}

CASES = tuple(
    CompileCase(
        op="softmax_quantize",
        kernel="softmax_quantize_kernel",
        variant="masked bf16" if has_mask else "bf16",
        shape_class=shape_class,
        signature=_SIGNATURE,
        # A stride of 1 is compiled in.
        constants={"mask_key": 1, "HAS_MASK": has_mask, "PRECISION": "bf16"},
        aligned=("x", "mask", "out", "K", "mask_image", "mask_head", "mask_query"),
        matrix_units={},
    )
    for has_mask in (False, True)
    for shape_class in ("narrow", "row", "wide", "long")
)
