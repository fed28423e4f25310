"""The layout in which int4_linear reads its weights, made from integers and undone to them.

K is cut in blocks of 128, N x 64 bytes each: a tile of consecutive channels is one run of memory,
and each channel's 64 bytes are four 16-byte loads. Word j of a channel's 16 int32 words holds the
eight codes of

    k = 32 p + 2 j + e,    p = 0..3, e = 0, 1,    in bits 4 p + 16 e to 4 p + 16 e + 3,

so that (word >> 4 p) & 0x000F000F is a pair of neighbours along K, one in each half: two
16-bit floats after one more instruction. Pass p over the words gives the 32 k's of quarter p,
which is a group of 32; groups of 64 and of multiples of 128 are whole quarters and blocks.

Codes are unsigned: q + 8 of a signed weight, with zero points moved likewise. K is filled up with
codes of 0, which meet only activations that are masked to 0.
"""

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError

BLOCK = 128
"""Codes of a channel in one block."""
OFFSET = 8
"""The offset from signed integers to codes, and so the code of zero_point 0."""
_QUARTERS, _WORDS = 4, 16


def check_group_size(group_size: int, K: int) -> None:
    """Refuse group sizes that do not fit the blocks.

    Raises:
        ConfigError: it is not 32, 64, a multiple of 128 that divides K, or K itself.
    """
    in_blocks = group_size in (32, 64) or (group_size > 0 and group_size % BLOCK == 0)
    if group_size != K and not (in_blocks and K % group_size == 0):
        raise ConfigError(
            f"4-bit weights in groups of {group_size} of {K} do not fit blocks of {BLOCK}: groups "
            f"are 32, 64 or a multiple of {BLOCK}, and divide K; or one group is a whole row",
            fix="quantize with groups of 32, 64 or 128",
        )


def pack_codes(codes: Tensor) -> Tensor:
    """Codes uint8[N, K] from 0 to 15 as int32[ceil(K / 128), N, 16].

    >>> pack_codes(torch.tensor([[1, 2, 3]], dtype=torch.uint8))[0, 0, :2].tolist()
    [131073, 3]
    """
    N, K = codes.shape
    blocks = -(-K // BLOCK)
    padded = torch.nn.functional.pad(codes, (0, blocks * BLOCK - K))
    parts = padded.view(N, blocks, _QUARTERS, _WORDS, 2)
    words = torch.zeros((N, blocks, _WORDS), dtype=torch.int64, device=codes.device)
    for p in range(_QUARTERS):
        for e in range(2):
            words |= parts[:, :, p, :, e].to(torch.int64) << (4 * p + 16 * e)
    # The greatest words are negative in 32 bits.
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).transpose(0, 1).contiguous()


def unpack_codes(packed: Tensor, K: int) -> Tensor:
    """The inverse of `pack_codes`: uint8[N, K]."""
    blocks, N, _ = packed.shape
    words = packed.transpose(0, 1)
    codes = torch.empty((N, blocks, _QUARTERS, _WORDS, 2), dtype=torch.uint8, device=packed.device)
    for p in range(_QUARTERS):
        for e in range(2):
            codes[:, :, p, :, e] = (words >> (4 * p + 16 * e)) & 15
    return codes.view(N, blocks * BLOCK)[:, :K].contiguous()
