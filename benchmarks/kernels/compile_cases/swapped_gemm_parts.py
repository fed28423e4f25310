"""What the units of swapped products share of their ahead-of-time cases."""

from collections.abc import Iterator, Mapping

from benchmarks.kernels.compile_case import CompileCase

ENDING: Mapping[str, str] = {
    "residual_scale": "fp32",
    "residual_zero_point": "i32",
    "act_low": "fp32",
    "act_high": "fp32",
    "out_scaling": "fp32",
    "out_zero_point": "i32",
    "out_min": "i32",
    "out_max": "i32",
}
"""The signature of an epilogue's numbers."""

PLAIN_END: Mapping[str, bool | str] = {
    "HAS_BIAS": False,
    "RESIDUAL": "none",
    "ACTIVATION": "none",
    "IS_INTEGER": False,
}
"""The constants of an epilogue that writes the sum."""

_SIGNATURE = {
    "partial": "*fp32",
    "row_scale": "*fp32",
    "bias": "*fp32",
    "residual": "*bf16",
    "out": "*bf16",
    "SPLITS": "i32",
    "size": "i32",
    "N": "i32",
    **ENDING,
}


def add_splits_cases(op: str, *, has_scale: bool, to_e4m3: bool = False) -> Iterator[CompileCase]:
    """The cases of `add_splits_kernel` as a unit launches it.

    Args:
        op: the unit's folder.
        has_scale: whether sums are multiplied by a scale of their row.
        to_e4m3: whether results are quantized to float8_e4m3fn too.
    """
    full = {**PLAIN_END, "HAS_BIAS": True, "RESIDUAL": "float", "ACTIVATION": "silu"}
    variants = [("plain", PLAIN_END, "*bf16"), ("residual, silu", full, "*bf16")]
    if to_e4m3:
        variants.append(("e4m3", PLAIN_END, "*fp8e4nv"))
    for variant, end, out in variants:
        yield CompileCase(
            op=op,
            kernel="add_splits_kernel",
            variant=variant,
            shape_class="add_splits",
            signature={**_SIGNATURE, "out": out},
            constants={"PER_ROW": has_scale, "HAS_SCALE": has_scale, **end},
            aligned=("partial", "row_scale", "bias", "residual", "out", "size", "N"),
            matrix_units={},
            lowest_capability=89 if out == "*fp8e4nv" else 80,
        )
