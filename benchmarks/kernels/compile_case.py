"""What the ahead-of-time gate compiles: one kernel with one set of arguments, as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["CompileCase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCase:
    """A kernel as a launch would specialise it; each unit lists its own in `compile_cases.py`.

    Args:
        op: the unit's folder, which has the kernel in its gpu.py.
        kernel: the jitted function's name there.
        variant: what tells this case from the kernel's others, in a few words.
        shape_class: the row of the tile tables.
        signature: argument name to Triton type, "*i8", "i32" or "fp32", without the constants.
        constants: constexpr arguments but for the tiles' own.
        constants_on: constants that a launch sets on a generation alone: {90: {"AS_BITS": False}}.
        aligned: arguments that a launch finds divisible by 16: pointers of torch's allocator, and
            sizes that a model usually has.
        matrix_units: compute capability (90) to the start of the matrix instruction's name that
            the loop must have ("IGMMA"); empty for a kernel bound by memory.
        fp_fusion: whether the launch lets multiply-adds be fused.
        lowest_capability: 89 for a kernel with fp8 in it, which older GPUs have no instruction for.
        packed_weights: names of the blocks, or constants, whose product is how many packed (4-bit)
            weights one turn of the loop unpacks, ("BLOCK_N", "BLOCK_K"): the gate counts
            instructions per weight; empty where none are.
        least_load: bytes that no load of the loop may take less of: the address of a smaller one
            costs a thread as much.
        least_wide: the share of bytes that the loop of a kernel with a matrix instruction must load
            16 at a time.
    """

    op: str
    kernel: str
    variant: str
    shape_class: str
    signature: Mapping[str, str]
    constants: Mapping[str, int | bool | str]
    aligned: tuple[str, ...]
    matrix_units: Mapping[int, str]
    constants_on: Mapping[int, Mapping[str, int | bool | str]] = field(default_factory=dict)
    fp_fusion: bool = False
    lowest_capability: int = 80
    packed_weights: tuple[str, ...] = ()
    least_load: int = 1
    least_wide: float = 0.9

    @property
    def name(self) -> str:
        """Unique among all cases."""
        return f"{self.op}/{self.kernel}/{self.shape_class}/{self.variant}"
