"""The variants of int8_conv2d that are compiled ahead of time."""

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.kernels.compile_case import CompileCase
from benchmarks.kernels.compile_cases.swapped_gemm_parts import ENDING

__all__ = ["CASES"]

_TENSORS = {
    "x": "*i8",
    "x_scale": "*fp32",
    "x_zero_point": "*i32",
    "weight": "*i8",
    "weight_scale": "*fp32",
    "weight_sums": "*i32",
    "bias": "*fp32",
    "residual": "*i8",
    "out": "*i8",
}
_SIZES = dict.fromkeys(
    ("M", "H", "W", "OH", "OW", "outputs", "stride_h", "stride_w", "padding_h", "padding_w"), "i32"
)
_END = {
    "dilation_h": "i32",
    "dilation_w": "i32",
    **ENDING,
}
_DEPTHWISE = {**_TENSORS, **_SIZES, **_END}
_PRODUCT = {**_DEPTHWISE, "groups": "i32", "depth_units": "i32"}
# Strides and dilations of 1 are constants to a launch.
_USUAL: dict[str, int | bool | str] = {
    "dilation_h": 1,
    "dilation_w": 1,
    "HAS_BIAS": True,
    "ACTIVATION": "relu",
}
_TO_INT8 = {**_USUAL, "RESIDUAL": "integer", "IS_INTEGER": True}
_TO_FLOAT = {**_USUAL, "RESIDUAL": "none", "IS_INTEGER": False}

_IMMA = {80: "IMMA", 89: "IMMA", 90: "IMMA", 100: "IMMA"}
_WGMMA = {**_IMMA, 90: "IGMMA"}
_DENSE = tuple(
    f"dense_{size}_{width}" for size in ("small", "large") for width in ("narrow", "wide")
)
_POINTWISE = tuple(name.replace("dense", "pointwise") for name in _DENSE)
_FOLDED = tuple(name.replace("dense", "folded") for name in _DENSE)
_STEMS = tuple(name.replace("dense", "stem") for name in _DENSE)


def _case(
    kernel: str,
    variant: str,
    shape_class: str,
    signature: Mapping[str, str],
    constants: Mapping[str, int | bool | str],
    matrix_units: Mapping[int, str],
) -> CompileCase:
    out = {} if constants["IS_INTEGER"] else {"out": "*bf16"}
    given = {name: kind for name, kind in {**signature, **out}.items() if name not in constants}
    return CompileCase(
        op="int8_conv2d",
        kernel=kernel,
        variant=variant,
        shape_class=shape_class,
        signature=given,
        constants=constants,
        aligned=(*_TENSORS, "outputs"),
        matrix_units=matrix_units,
    )


def _products(
    variant: str,
    classes: tuple[str, ...],
    constants: Mapping[str, int | bool | str],
    matrix_units: Mapping[int, str] = _WGMMA,
    least_load: int = 1,
) -> tuple[CompileCase, ...]:
    kernel = "int8_conv2d_kernel"
    cases = (_case(kernel, variant, name, _PRODUCT, constants, matrix_units) for name in classes)
    return tuple(replace(case, least_load=least_load) for case in cases)


_WINDOW = {"KH": 3, "KW": 3, "IS_PADDED": True, "groups": 1}
_STEM = {**_WINDOW, "KH": 7, "KW": 7, "IS_FOLDED": True}
_CHANNELS = {**_WINDOW, "stride_h": 1, "stride_w": 1, "IS_FOLDED": False, "UNIT": 16}

_ONE_TAP = {**_CHANNELS, "KH": 1, "KW": 1, "IS_PADDED": False}

CASES = (
    *_products("1x1, residual, int8", _POINTWISE, {**_TO_INT8, **_ONE_TAP}),
    *_products("3x3, residual, int8", _DENSE, {**_TO_INT8, **_CHANNELS}),
    *_products("3x3, bf16", _DENSE[-1:], {**_TO_FLOAT, **_CHANNELS}),
    # Three bytes a pixel are read one by one, and bound it; wider loads have no address there.
    # `widen_pixels` makes them four where a kernel quantizes the image.
    *_products("7x7 of 3 channels, int8", _STEMS, {**_TO_INT8, **_STEM, "UNIT": 3}, {}),
    *_products(
        "7x7 of 4 channels, int8", _STEMS, {**_TO_INT8, **_STEM, "UNIT": 4}, {}, least_load=4
    ),
    *_products(
        "3x3 of 32 channels, int8",
        _FOLDED,
        {**_TO_INT8, **_CHANNELS, "IS_FOLDED": True, "UNIT": 32},
    ),
    _case(
        "depthwise_kernel",
        "3x3, int8",
        "depthwise",
        _DEPTHWISE,
        {**_TO_INT8, "RESIDUAL": "none", "KH": 3, "KW": 3, "MULTIPLIER": 1},
        {},
    ),
)
