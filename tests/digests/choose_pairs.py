"""Which backends and recipes a model of the corpus is recorded with."""

import zlib

__all__ = ["OTHERS", "STATIC", "pairs_of"]

STATIC = (("xnnpack", "int8"), ("onnx", "int8"), ("cpu", "int8"))
"""Every model has one of these."""

OTHERS_STATIC = (
    ("xnnpack", "int8_minmax"),
    ("cpu", "int8_reduced"),
    ("cpu", "int8_full"),
    ("cpu", "int8_bf16"),
    ("cuda", "int8"),
    ("cuda", "fp8"),
)
_WITHOUT_DATA = {
    "xnnpack": ("int8_dynamic", "w8", "w4", "a8w4", "a8w4_g32"),
    "onnx": (
        *("int8_dynamic", "int8_dynamic_per_tensor", "w8", "w4", "a8w4", "w4_g32", "a8w4_g32"),
        *("w3", "w2_g32", "fp8_weight_only", "fp8_e5m2_weight_only", "fp6_weight_only"),
        *("fp4_weight_only", "mxfp8_weight_only", "mxfp6_weight_only", "mxfp4_weight_only"),
        *("nvfp4_weight_only", "nf4", "nf4_double", "lut4", "lut2_per_tensor", "w1", "w1.58"),
    ),
    "cpu": ("int8_dynamic", "a8w4", "w8", "w4", "w4_g32"),
    "cuda": (
        *("int8_dynamic", "int8_dynamic_per_tensor", "w4", "w4_g32", "a8w4", "a8w4_g32"),
        *("fp8_dynamic", "fp8_dynamic_per_tensor"),
    ),
}
WITHOUT_DATA = tuple((backend, name) for backend, names in _WITHOUT_DATA.items() for name in names)
OTHERS = (*OTHERS_STATIC, *WITHOUT_DATA)
"""Every family of recipes of every backend; the group sizes and widths beside these differ from
them in a number alone."""

REPEATED = {"zoo grouped_rotary": WITHOUT_DATA, "small mobilenet": OTHERS_STATIC}
"""Models that have all of them, so that each is recorded at least once."""


def pairs_of(name: str, has_linear: bool, own: tuple[tuple[str, str], ...]) -> set[tuple[str, str]]:
    """The (backend, recipe) pairs of a model: fixed by its name, whatever else is recorded."""
    if name in REPEATED:
        return {*own, *REPEATED[name]}
    if name.startswith("drawn"):
        return {*own}
    number = zlib.crc32(name.encode())
    pairs = {*own, STATIC[number % len(STATIC)]}
    if number % 4 == 1:
        others = WITHOUT_DATA if has_linear and number % 5 else OTHERS_STATIC
        pairs.add(others[number // 10 % len(others)])
    return pairs
