"""Operators that stay float on a GPU because their kernel measured slower, or was not measured."""

from dataclasses import dataclass

import torch

from pt2e_quant.backends.target.policy import SPECTRA, Policy, slower_preference
from pt2e_quant.graph.op_table import OpRow, Preference
from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.launch import FP8_CAPABILITY
from pt2e_quant.kernels.measured import Variant, measured_of
from pt2e_quant.kernels.quantized_values import rewritten
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.kernels.tiles import device_slug

UNMEASURED = "unmeasured"
"""The name of the preference for what was measured on the GPU at hand; lowering asks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """The measured speed of kernels on the device that a program is lowered for.

    Args:
        device: its name as `kernels.tiles.device_slug` writes it, "" where there is none.
        allow_unmeasured: use a kernel whose shape class was not measured there.
        allow_slower: use a kernel whose shape class measured slower than float there.
        capability: its compute capability, 90 for 9.0; the newest that matters by default.
    """

    device: str
    allow_unmeasured: bool
    allow_slower: bool = False
    capability: int = 100

    @property
    def has_fp8(self) -> bool:
        """True if the device has 8-bit floats: Ada and later."""
        return self.capability >= FP8_CAPABILITY

    def ratio(self, kernel: Kernel, match: Match) -> float | None:
        """Speed over float of a match's shape class; None if not measured."""
        shape_class = kernel.shape_class(match)
        measured = measured_of(kernel.op, self.device, _variant(kernel, match))
        return measured.get(shape_class, kernel.measured.get(shape_class))

    def allows(self, op: str, variant: Variant = Variant.PLAIN) -> bool:
        """True if a fused operator that has no pattern of its own may be used.

        It takes the place of several launches over the same bytes, for any shape.

        Args:
            op: the unit's folder.
            variant: what it would write.
        """
        measured = measured_of(op, self.device, variant)
        if not measured:
            return self.allow_unmeasured
        return self.allow_slower or min(measured.values()) >= 1.0

    def objection(self, kernel: Kernel, match: Match) -> str | None:
        """Why a kernel is not used for a match as far as the device goes; None if it is."""
        if self.capability < _lowest_capability(kernel, match):
            return (
                f"{kernel.op} needs compute capability 8.9 (Ada) or later for 8-bit floats, "
                f"{self.device} has {self.capability / 10}"
            )
        ratio = self.ratio(kernel, match)
        if ratio is None:
            if self.allow_unmeasured:
                return None
            where = f"on {self.device}" if self.device else "on a GPU"
            return f"{kernel.op} was not measured {where} for such a shape"
        if ratio < 1.0 and not self.allow_slower:
            return f"{kernel.op} measured {ratio:.2f} times as fast as float for such a shape"
        return None


def measures_here(*, allow_unmeasured: bool = False, allow_slower: bool = False) -> Measures:
    """The measured speed of kernels on this machine's GPU; empty if there is none."""
    if not torch.cuda.is_available():
        return Measures(device="", allow_unmeasured=allow_unmeasured, allow_slower=allow_slower)
    major, minor = torch.cuda.get_device_capability()
    return Measures(
        device=device_slug(torch.cuda.get_device_name()),
        allow_unmeasured=allow_unmeasured,
        allow_slower=allow_slower,
        capability=10 * major + minor,
    )


def policy_of(registry: Registry) -> Policy:
    """The policy for a registry's kernels."""
    kernels = {kernel.name: kernel for kernel in registry}

    def is_slower(row: OpRow, match: Match) -> bool:
        ratio = measures_here().ratio(kernels[row.name], match)
        return ratio is not None and ratio < 1.0

    return Policy(
        of_matches=(
            SPECTRA,
            slower_preference(
                "leave it float, as such a layer gains nothing on this GPU, or quantize it all the "
                'same, with backend pq.backends.get("cuda").allowing_slower() (--allow-slower)',
                is_slower,
            ),
            Preference(
                name=UNMEASURED,
                text="a kernel that was measured for such a shape on the GPU that it is lowered on",
            ),
        )
    )


def _lowest_capability(kernel: Kernel, match: Match) -> int:
    """The lowest compute capability that a kernel, or 8-bit floats that it writes, need."""
    written = rewritten(match.anchor) if kernel.writes_e4m3 else None
    if written is not None and written[0].dtype.is_floating_point:
        return FP8_CAPABILITY
    return kernel.lowest_capability


def _variant(kernel: Kernel, match: Match) -> Variant:
    """E4M3 where a kernel that all GPUs have would write 8-bit floats for a match."""
    is_e4m3 = _lowest_capability(kernel, match) > kernel.lowest_capability
    return Variant.E4M3 if is_e4m3 else Variant.PLAIN
