"""Sums of two neighbouring products of 8 bits, which CPUs without VNNI add in 16 bits.

x86's `vpmaddubsw` multiplies uint8 activations by int8 weights and adds each two neighbours along a
row; what leaves int16 is cut off. With activations of 255 that is the case where the positive
weights of a pair, or its negative ones, add up to more than 128. Rows whose pairs stay within that
are exact on any CPU, with all 8 bits of the activations.
"""

import torch
from torch import Tensor
from torch.nn import functional

MOST = 128
"""The greatest sum of a pair's weights of one sign: 255 * 128 < 2 ** 15."""


def pairs_of(weight: Tensor) -> Tensor:
    """The neighbours of each row, as kernels add them up.

    Kernels take a row of a convolution position by position, and the channels of a position one
    after the other. An odd number of channels is padded by some and runs on into the next position
    in others: both pairs are among the result.

    Args:
        weight: [rows, channels, *window].

    Returns:
        [rows, pairs, 2] of the same dtype, 0 beside the last of an odd number.
    """
    by_position = weight.flatten(2).transpose(1, 2) if weight.dim() > 2 else weight.unsqueeze(1)
    found = [_halved(by_position).flatten(1, 2)]
    if weight.shape[1] % 2 and by_position.shape[1] > 1:
        found.append(_halved(by_position.flatten(1)))
    return torch.cat(found, 1)


def greatest_pairs(weight: Tensor) -> Tensor:
    """The greatest sum of a pair's weights of one sign in each row; 0 of an empty row.

    Args:
        weight: [rows, channels, *window], integers or real numbers.

    Returns:
        float64[rows], no negative ones.
    """
    pairs = pairs_of(weight.double())
    if not pairs.numel():
        return pairs.new_zeros(weight.shape[0])
    return torch.maximum(_one_sign(pairs), _one_sign(-pairs)).amax(1)


def fitted(codes: Tensor) -> Tensor:
    """Integers whose pairs stay within `MOST`: the greater of a pair gives way, by what is over.

    Args:
        codes: int[rows, channels, *window], of at most `MOST` each.

    Returns:
        Integers of the same shape and dtype; those of pairs that fit are as they were.
    """
    codes = codes.clone()
    rows = codes.flatten(2).transpose(1, 2) if codes.dim() > 2 else codes.unsqueeze(1)
    runs_on = codes.shape[1] % 2 and rows.shape[1] > 1
    for joined in (False, True) if runs_on else (False,):
        made = (_fit(rows.flatten(1)) if joined else _fit(rows)).reshape(rows.shape)
        rows = made
    kept = rows.transpose(1, 2) if codes.dim() > 2 else rows.squeeze(1)
    return kept.reshape(codes.shape).to(codes.dtype)


def _fit(rows: Tensor) -> Tensor:
    """Fit the pairs along the last axis."""
    pairs = _halved(rows.int())
    size, sign = pairs.abs(), pairs.sign()
    over = (size.sum(-1) - MOST).clamp(min=0) * (sign[..., 0] * sign[..., 1] > 0)
    first = (size[..., 0] >= size[..., 1]).int()
    less = torch.stack((over * first, over * (1 - first)), -1)
    return (sign * (size - less)).flatten(-2)[..., : rows.shape[-1]]


def _one_sign(pairs: Tensor) -> Tensor:
    return pairs.clamp(min=0).sum(-1)


def _halved(rows: Tensor) -> Tensor:
    """[…, n] as […, (n + 1) // 2, 2]."""
    padded = functional.pad(rows, (0, rows.shape[-1] % 2))
    return padded.reshape(*rows.shape[:-1], -1, 2)
