"""The variants of embedding_gather that are compiled ahead of time."""

from benchmarks.kernels.compile_case import CompileCase

__all__ = ["CASES"]

_SIGNATURE = {
    "table": "*i8",
    "scale": "*fp32",
    "zero_point": "*i32",
    "indices": "*i64",
    "out": "*bf16",
    **dict.fromkeys(("M", "V", "K", "row_bytes", "groups", "group_size"), "i32"),
    **dict.fromkeys(("act_low", "act_high", "out_scaling"), "fp32"),
    **dict.fromkeys(("out_zero_point", "out_min", "out_max"), "i32"),
}
_VARIANTS: dict[str, tuple[dict[str, str], dict[str, bool | int]]] = {
    "int8 rows": ({}, {"ONE_GROUP": True, "HAS_ZERO_POINT": False, "BITS": 8, "IS_SIGNED": True}),
    "int4, zero points": (
        {"table": "*u8"},
        {"ONE_GROUP": False, "HAS_ZERO_POINT": True, "BITS": 4, "IS_SIGNED": True},
    ),
}

CASES = tuple(
    CompileCase(
        op="embedding_gather",
        kernel="embedding_gather_kernel",
        variant=variant,
        shape_class=shape_class,
        signature={**_SIGNATURE, **types},
        constants={"ACTIVATION": "none", "IS_INTEGER": False, **constants},
        aligned=("table", "scale", "zero_point", "indices", "out", "K", "row_bytes", "group_size"),
        matrix_units={},
    )
    for variant, (types, constants) in _VARIANTS.items()
    for shape_class in ("narrow", "row", "wide", "long")
)
