"""What the units of swapped products share of their ahead-of-time cases."""

from collections.abc import Iterator, Mapping

from pt2e_quant.kernels.compile_case import CompileCase

__all__ = ["ENDING", "PLAIN_END", "add_splits_cases"]

ENDING: Mapping[str, str] = {
    "residual_scale": "fp32",
    "residual_zero_point": "i32",
    "act_low": "fp32",
    "act_high": "fp32",
    "inverse_scale": "fp32",
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


def add_splits_cases(op: str, *, has_scale: bool) -> Iterator[CompileCase]:
    """The cases of `add_splits_kernel` as a unit launches it.

    Args:
        op: the unit's folder.
        has_scale: whether sums are multiplied by a scale of their row.
    """
    full = {**PLAIN_END, "HAS_BIAS": True, "RESIDUAL": "float", "ACTIVATION": "silu"}
    for variant, end in (("plain", PLAIN_END), ("residual, silu", full)):
        yield CompileCase(
            op=op,
            kernel="add_splits_kernel",
            variant=variant,
            shape_class="add_splits",
            signature=_SIGNATURE,
            constants={"PER_ROW": has_scale, "HAS_SCALE": has_scale, **end},
            aligned=("partial", "row_scale", "bias", "residual", "out", "size", "N"),
            matrix_units={},
        )
