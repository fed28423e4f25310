"""The operator `pt2e_quant::unpack_int4_linear`: codes from the layout of torch's 4-bit product.

The operator permutes codes in an order of its CPU: packing four bits of each place tells it.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.packing import pack
from pt2e_quant.kernels.int4_linear.few_rows_op import UINT4, PackInt4

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_BITS = 4
_BLOCK = 64
"""Rows whose codes the operator keeps together: it packs 16, 32 or 64 at a time."""


def _split_bytes(packed: Tensor) -> Tensor:
    flat = packed.reshape(-1)
    return torch.stack([flat & 15, flat >> _BITS], 1).reshape(-1)


@lru_cache(maxsize=16)
def _came_from(rows: int, columns: int) -> Tensor:
    """The place of each code of packed rows before: the places are packed, four bits at a time."""
    count = rows * columns
    places = torch.arange(count, dtype=torch.int64).reshape(rows, columns)
    found = torch.zeros(count, dtype=torch.int64)
    for shift in range(0, max(1, count - 1).bit_length(), _BITS):
        bits = ((places >> shift) & 15).to(torch.uint8)
        found |= _split_bytes(PackInt4(pack(bits, UINT4))).to(torch.int64) << shift
    return found


@lru_cache(maxsize=1)
def rows_of_a_tile() -> int:
    """How many rows' codes of one column lie together, the first half in the low bits; 0 if other.

    32 on CPUs with AVX2.
    """
    columns = 32
    found = _came_from(_BLOCK, columns).view(-1, 2)
    for rows in (_BLOCK, _BLOCK // 2):
        low = torch.arange(_BLOCK).view(-1, 1, 2, rows // 2) * columns
        places = low + torch.arange(columns).view(-1, 1, 1)  # [tiles, columns, 2, rows / 2]
        if torch.equal(found, places.transpose(2, 3).reshape(-1, 2)):
            return rows
    return 0


def unpack_tiles(tiles: Tensor, columns: int) -> Tensor:
    """Codes uint8[N, K] of `PackInt4`."""
    rows = tiles.shape[0]
    # The last rows, fewer than a block, are packed in smaller tiles.
    whole = rows - rows % _BLOCK
    made = [
        _unpack_alike(part, size, columns)
        for part, size in ((tiles[:whole], _BLOCK), (tiles[whole:], rows - whole))
        if len(part)
    ]
    return torch.cat(made)


def _unpack_alike(tiles: Tensor, size: int, columns: int) -> Tensor:
    """The same of blocks of one size."""
    tile = rows_of_a_tile()
    if tile and size % tile == 0:
        split = torch.stack(_halves(tiles, columns))
        return split.permute(2, 0, 3, 1).reshape(-1, columns)
    packed = _split_bytes(tiles.contiguous()).view(-1, size * columns)
    codes = torch.empty_like(packed)
    codes[:, _came_from(size, columns)] = packed
    return codes.view(-1, columns)


def _halves(tiles: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The low and the high codes of whole tiles, each uint8[columns, N / tile, tile / 2]."""
    runs = tiles.contiguous().view(-1, columns, rows_of_a_tile() // 2).transpose(0, 1)
    return runs & 15, runs >> _BITS


def _fake_unpack_tiles(tiles: Tensor, columns: int) -> Tensor:
    return tiles.new_empty((tiles.shape[0], columns))


_LIBRARY.define("unpack_int4_linear(Tensor tiles, int columns) -> Tensor")  # type: ignore[no-untyped-call]
torch.library.impl(_LIBRARY, "unpack_int4_linear", "CompositeExplicitAutograd")(unpack_tiles)
torch.library.register_fake("pt2e_quant::unpack_int4_linear", lib=_LIBRARY)(_fake_unpack_tiles)

UnpackInt4: Any = torch.ops.pt2e_quant.unpack_int4_linear.default
"""Codes uint8[N, K] of `PackInt4` of [N, K / 2] bytes; N is filled up to sixteens."""
