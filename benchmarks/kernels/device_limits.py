"""What GPUs can move and compute, from their data sheets: the limits that kernels are held to."""

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.kernels.bench_case import MathUnit
from pt2e_quant.kernels.cost import Cost

__all__ = ["LIMITS", "DeviceLimits", "limits_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """A device's published limits; no program reaches them.

    Args:
        name: as people write it.
        bytes_per_s: of its memory.
        operations_per_s: of each unit, dense; a multiply-add is two.
    """

    name: str
    bytes_per_s: float
    operations_per_s: Mapping[MathUnit, float]

    def seconds(self, cost: Cost, unit: MathUnit) -> float | None:
        """The least time of a call; None where the device has no such unit."""
        rate = self.operations_per_s.get(unit)
        if rate is None:
            return None
        return cost.seconds(bytes_per_s=self.bytes_per_s, operations_per_s=rate)

    def is_memory_bound(self, cost: Cost, unit: MathUnit) -> bool:
        """Whether moving takes longer than computing."""
        return cost.bytes / self.bytes_per_s >= cost.operations / self.operations_per_s[unit]


def _rates(half: float, eight_bits: float, float32: float, *, fp8: bool) -> dict[MathUnit, float]:
    rates = {MathUnit.HALF: half, MathUnit.INT8: eight_bits, MathUnit.FLOAT32: float32}
    return {**rates, MathUnit.FP8: eight_bits} if fp8 else rates


# NVIDIA's data sheets: H200 SXM, H100 SXM, A100 SXM 80 GB, L40S; dense figures.
LIMITS: Mapping[str, DeviceLimits] = {
    "h200": DeviceLimits(
        name="H200 SXM",
        bytes_per_s=4.8e12,
        operations_per_s=_rates(989e12, 1979e12, 67e12, fp8=True),
    ),
    "h100": DeviceLimits(
        name="H100 SXM",
        bytes_per_s=3.35e12,
        operations_per_s=_rates(989e12, 1979e12, 67e12, fp8=True),
    ),
    "a100": DeviceLimits(
        name="A100 SXM 80 GB",
        bytes_per_s=2.039e12,
        operations_per_s=_rates(312e12, 624e12, 19.5e12, fp8=False),
    ),
    "l40s": DeviceLimits(
        name="L40S",
        bytes_per_s=0.864e12,
        operations_per_s=_rates(362e12, 733e12, 91.6e12, fp8=True),
    ),
}


def limits_of(slug: str) -> DeviceLimits | None:
    """The limits of a device named as `tiles.device_slug` does; None if none are kept.

    >>> limits_of("nvidia_h200").name
    'H200 SXM'
    """
    return next((LIMITS[word] for word in slug.split("_") if word in LIMITS), None)
