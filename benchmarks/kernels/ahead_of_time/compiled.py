"""What the compiler hands to the disassembler."""

from dataclasses import dataclass

__all__ = ["Compiled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A compiled kernel.

    Args:
        cubin: the binary.
        ttir: Triton's first form of it, in which types are still those of the source.
        shared_bytes: shared memory that a launch asks for.
        warps: of one program; more than the tiles' own where Triton specialises warps.
    """

    cubin: bytes
    ttir: str
    shared_bytes: int
    warps: int
