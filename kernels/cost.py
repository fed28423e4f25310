"""The cost of a kernel call: bytes moved and operations, the two sides of its roofline."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The least one call can do.

    Args:
        bytes: read from and written to memory, each tensor once.
        operations: of the matrix units, or arithmetic ones where there are none.
    """

    bytes: int
    operations: int

    def seconds(self, *, bytes_per_s: float, operations_per_s: float) -> float:
        """The roofline: the longer of moving and computing.

        >>> Cost(bytes=100, operations=1000).seconds(bytes_per_s=10.0, operations_per_s=1000.0)
        10.0
        """
        return max(self.bytes / bytes_per_s, self.operations / operations_per_s)


def moved_bytes(*tensors: Tensor | None) -> int:
    """Bytes of tensors that are moved once; fake tensors do."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
