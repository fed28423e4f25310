"""Choose the number of parts that K is split into, so that small products fill the device."""

import torch

from pt2e_quant.kernels.tiles import TileConfig

_PROGRAMS_PER_PROCESSOR = 3
"""So many programs keep enough loads in flight to fill a processor's share of the bandwidth."""
_LEAST_STEPS = 4
"""A run has at least so many steps: fewer would not fill the software pipeline."""
_PROCESSORS = 132
"""The number of an H100 or H200, assumed for tensors that are on no GPU."""


def splits(tiles: int, steps: int, *, most: int, processors: int) -> int:
    """Return the number of runs of steps along K in which each tile of the result is computed.

    The same for the same shape on the same device, so that results do not vary from run to run.

    Args:
        tiles: of the result.
        steps: along K.
        most: of the tile table; 1 for no split.
        processors: multiprocessors of the device.

    >>> splits(64, 64, most=8, processors=132), splits(224, 64, most=8, processors=132)
    (7, 2)
    >>> splits(64, 6, most=8, processors=132), splits(64, 64, most=1, processors=132)
    (1, 1)
    """
    wanted = -(-_PROGRAMS_PER_PROCESSOR * processors // max(1, tiles))
    count = max(1, min(wanted, most, steps // _LEAST_STEPS))
    each = -(-steps // count)
    return -(-steps // each)


def processors_of(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if device.type != "cuda":
        return _PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def cut_along_k(
    tiles: TileConfig, M: int, N: int, steps: int, device: torch.device
) -> tuple[int, int]:
    """Programs that compute the tiles of a result [M, N], and the runs of K each is computed in.

    Args:
        tiles: with BLOCK_M, BLOCK_N and SPLIT_K, the most runs.
        M: rows.
        N: columns.
        steps: along K.
        device: that runs them.
    """
    programs = -(-M // tiles["BLOCK_M"]) * -(-N // tiles["BLOCK_N"])
    return programs, splits(
        programs, steps, most=tiles["SPLIT_K"], processors=processors_of(device)
    )
