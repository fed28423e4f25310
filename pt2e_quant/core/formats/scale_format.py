"""Storage formats of the scales of a quantized tensor."""

from dataclasses import dataclass, replace

import torch

from pt2e_quant.core.errors import ConfigError

_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e8m0fnu,
    torch.float8_e4m3fn,
)


_PRECISIONS = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleFormat:
    """The form of scales.

    Args:
        dtype: what each is rounded to and kept in: float32, float16, bfloat16, float8_e8m0fnu
            (powers of two) or float8_e4m3fn.
        precision: each is rounded to this narrower dtype, and kept in `dtype`, float32: for a
            runtime that rounds scales itself, so that the graph says what it computes with.
        is_power_of_two: each is rounded up to a power of two, so that nothing is clipped.
        double_group: each run of so many scales is kept as uint8 steps of one float32 scale
            ("double quantization"; the paper, QLoRA, takes 256). None keeps them as they are.
        in_tensor_units: each is in units of one float32 scale of the whole tensor, the one that
            makes the greatest of them the greatest of the dtype (NVFP4).

    Raises:
        ConfigError: the fields contradict each other, or the dtype is none of these.
    """

    dtype: torch.dtype = torch.float32
    precision: torch.dtype | None = None
    is_power_of_two: bool = False
    double_group: int | None = None
    in_tensor_units: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            known = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
            raise ConfigError(f"scales are not kept in {self.dtype}", fix=f"use one of {known}")
        if self.precision is not None:
            self._check_precision()
        if self.double_group is None:
            return
        if self.double_group < 2 or self.dtype != torch.float32 or self.in_tensor_units:
            raise ConfigError(
                "double-quantized scales are uint8 in groups of 2 or more, and no other form "
                f"besides, found {self}"
            )
        if self.is_power_of_two:
            raise ConfigError("double-quantized scales are no powers of two")

    def _check_precision(self) -> None:
        is_other = self.dtype != torch.float32 or self.double_group is not None
        if self.precision not in _PRECISIONS or is_other or self.is_power_of_two:
            raise ConfigError(
                "scales of a lower precision are float32 rounded to float16 or bfloat16, and no "
                f"other form besides, found {self}"
            )

    def fits(self, accepted: "ScaleFormat") -> bool:
        """True if scales of this form are of that one: powers of two and rounded ones are."""
        plain = replace(self, is_power_of_two=False, precision=None)
        return accepted in (self, plain)

    @property
    def bits(self) -> float:
        """Bits that one scale takes; the tensor's own scale is not counted."""
        if self.double_group is not None:
            return 8 + 32 / self.double_group
        return self.dtype.itemsize * 8

    @property
    def is_plain(self) -> bool:
        """True if each scale is a float32, as quantized_decomposed takes it."""
        return (
            self.dtype == torch.float32 and self.double_group is None and not self.in_tensor_units
        )

    def __str__(self) -> str:
        parts = [str(self.dtype).removeprefix("torch.")]
        parts += [f"as {self.precision}".replace("torch.", "")] if self.precision else []
        parts += ["powers of two"] if self.is_power_of_two else []
        parts += [f"double-quantized by {self.double_group}"] if self.double_group else []
        parts += ["in units of the tensor's"] if self.in_tensor_units else []
        return " ".join(parts) + " scales"


FLOAT32_SCALES = ScaleFormat()
