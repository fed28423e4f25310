"""What GPU generations allow: the limits that occupancy and issue slots are counted by."""

from collections.abc import Mapping
from dataclasses import dataclass

from pt2e_quant.core.errors import ConfigError

__all__ = ["CAPABILITIES", "GENERATIONS", "Generation", "capability_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Limits of one multiprocessor (SM); source: CUDA C++ Programming Guide, compute capabilities.

    Args:
        shared_per_block: bytes that a block may ask for.
        shared_per_sm: bytes of all its blocks, 1024 of each the system's own.
        warps: resident at once.
        blocks: resident at once.
        multiply_adds: dense ones a clock of the matrix units, by the start of the instruction;
            empty where they are not published.
    """

    shared_per_block: int
    shared_per_sm: int
    warps: int
    blocks: int
    multiply_adds: Mapping[str, int]

    def resident_blocks(self, *, warps: int, registers: int, shared: int) -> int:
        """How many blocks of a kernel one multiprocessor holds; 0 where one does not fit.

        Registers: 16384 in each of four partitions, given to a warp in units of 256.

        >>> GENERATIONS[90].resident_blocks(warps=8, registers=128, shared=131072)
        1
        >>> GENERATIONS[90].resident_blocks(warps=4, registers=128, shared=36864)
        4
        """
        if shared > self.shared_per_block:
            return 0
        per_warp = -(-registers * 32 // 256) * 256
        by_registers = 4 * (16384 // per_warp) // warps if per_warp else self.blocks
        by_shared = self.shared_per_sm // (shared + 1024)
        return min(self.blocks, self.warps // warps, by_registers, by_shared)


_KB = 1024
GENERATIONS: Mapping[int, Generation] = {
    # A100: 312 Tflop/s bf16 and 624 Top/s int8 over 108 SM at 1.41 GHz.
    80: Generation(
        shared_per_block=163 * _KB,
        shared_per_sm=164 * _KB,
        warps=64,
        blocks=32,
        multiply_adds={"IMMA": 2048, "HMMA": 1024},
    ),
    # L40S: 362 Tflop/s bf16 and 733 Top/s int8 over 142 SM at 2.52 GHz.
    89: Generation(
        shared_per_block=99 * _KB,
        shared_per_sm=100 * _KB,
        warps=48,
        blocks=24,
        multiply_adds={"IMMA": 1024, "HMMA": 512, "QMMA": 1024},
    ),
    # H100: 989 Tflop/s bf16 and 1979 Top/s int8 over 132 SM at 1.83 GHz.
    90: Generation(
        shared_per_block=227 * _KB,
        shared_per_sm=228 * _KB,
        warps=64,
        blocks=32,
        multiply_adds={
            **{"IGMMA": 4096, "HGMMA": 2048, "QGMMA": 4096},
            # As if mma.sync reached the same; it does not quite.
            **{"IMMA": 4096, "HMMA": 2048, "QMMA": 4096},
        },
    ),
    100: Generation(
        shared_per_block=227 * _KB,
        shared_per_sm=228 * _KB,
        warps=64,
        blocks=32,
        multiply_adds={},
    ),
}

CAPABILITIES = tuple(GENERATIONS)
"""Compute capabilities that kernels are compiled for: Ampere, Ada, Hopper, Blackwell."""

_DEVICES = {"a100": 80, "a800": 80, "l4": 89, "l40": 89, "h100": 90, "h200": 90, "b200": 100}


def capability_of(slug: str) -> int:
    """The compute capability of a device that has a tile table, from the table's name.

    Raises:
        ConfigError: no such device is known here.

    >>> capability_of("nvidia_h200"), capability_of("nvidia_a100_sxm4_80gb")
    (90, 80)
    """
    words = slug.split("_")
    for name, capability in _DEVICES.items():
        if name in words or f"{name}s" in words:
            return capability
    raise ConfigError(
        f'there is a tile table for "{slug}", whose compute capability is not known',
        fix="add the device to ahead_of_time/generations.py",
    )
