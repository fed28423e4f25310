"""Detection of machines whose oneDNN multiplies uint8 by int8 without saturating.

Instruction sets before VNNI add pairs of products in 16 bits: 255 * 127 * 2 does not fit and is
cut off, silently, to half of the true sum. Activations of 7 bits fit (127 * 127 * 2 < 2 ** 15). The
CPU's feature flags do not tell what oneDNN runs (ONEDNN_MAX_CPU_ISA caps it), so it is tried.
Weights whose pairs fit into 16 bits (`core.pair_sums`) are multiplied exactly all the same.
"""

from functools import cache

import torch
from torch import Tensor

from pt2e_quant.core.pair_sums import MOST, greatest_pairs

_K, _N = 64, 16


@cache
def onednn_is_exact() -> bool:
    """True if a linear of the largest uint8 and int8 values gives the exact sums here.

    One product of (1, 64) by (16, 64) and one of (16, 64), since oneDNN has kernels of its own
    for single rows; milliseconds, once a process.
    """
    return all(_largest_sum(rows) == 255 * 127 * _K for rows in (1, 16))


def multiplies_exactly(weight: Tensor) -> bool:
    """True if sums of uint8 activations by a weight int8[N, K, *window] are exact here.

    Kernels of one channel for each group add in 32 bits anywhere.
    """
    is_depthwise = weight.dim() > 2 and weight.shape[1] == 1
    if onednn_is_exact() or is_depthwise or not weight.numel():
        return True
    return float(greatest_pairs(weight).amax()) <= MOST


def _largest_sum(rows: int) -> float:
    x = torch.full((rows, _K), 255, dtype=torch.uint8)
    weight = torch.ops.onednn.qlinear_prepack(torch.full((_N, _K), 127, dtype=torch.int8), None)
    scales, zeros = torch.ones(_N), torch.zeros(_N, dtype=torch.int32)
    found: Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 0, weight, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return float(found.min())
