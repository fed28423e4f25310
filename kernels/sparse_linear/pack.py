"""2:4 semi-sparse codes as the kernel reads them: two values of each four, and which two."""

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.packing import pack, unpack

PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))
"""The places of the two values that are kept of four neighbours: six ways, three bits."""
_UINT3: torch.dtype = getattr(torch, "uint3")  # noqa: B009  # torch's stubs do not list it


def split_fours(codes: Tensor) -> tuple[Tensor, Tensor]:
    """The values of codes int8[N, K], int8[N, K / 2], and their places in `PAIRS`, uint8[N, K / 4].

    Args:
        codes: at most two of each four neighbours along K are other than 0.

    Raises:
        ConfigError: four neighbours hold more than two values.
    """
    N, K = codes.shape
    fours = codes.reshape(-1, 4)
    held = (fours != 0).to(torch.int8)
    if fours.numel() and int(held.sum(1).max()) > 2:
        raise ConfigError(
            "four neighbours hold more than two values",
            fix="prune the weight before it is quantized: prune_2_4(weight)",
        )
    # The first two places in order of (holds a value, place): zeros fill up.
    rank = held.to(torch.int64) * 4 + torch.arange(3, -1, -1, device=codes.device)
    places = rank.topk(2, dim=1).indices.sort(1).values
    known = torch.tensor(PAIRS, device=codes.device)
    pairs = (known[None] == places[:, None]).all(2).to(torch.uint8).argmax(1).to(torch.uint8)
    return fours.gather(1, places).reshape(N, K // 2), pairs.reshape(N, K // 4)


def join_fours(kept: Tensor, places: Tensor) -> Tensor:
    """The codes int8[N, K] that `split_fours` took."""
    N, count = places.shape
    fours = kept.new_zeros(N * count, 4)
    known = torch.tensor(PAIRS, device=kept.device)
    fours.scatter_(1, known[places.reshape(-1).to(torch.int64)], kept.reshape(-1, 2))
    return fours.reshape(N, 4 * count)


def pack_sparse(codes: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values of codes int8[N, K] in the bytes of `core.packing`, and their pairs in three bits.

    Args:
        codes: as `split_fours` takes them; what it raises too.
        dtype: that the values are packed as.
    """
    kept, places = split_fours(codes)
    return pack(kept, dtype), pack(places, _UINT3)


def unpack_sparse(values: Tensor, pairs: Tensor, dtype: torch.dtype, K: int) -> Tensor:
    """The codes int8[N, K] that `pack_sparse` took."""
    N = len(values)
    places = unpack(pairs, _UINT3, (N, K // 4))
    return join_fours(unpack(values, dtype, (N, K // 2)), places)


def pack_places(places: Tensor) -> Tensor:
    """Places uint8[N, K / 4] by three in a byte: of 6 * 6 * 6 = 216 ways, across rows."""
    flat = places.reshape(-1)
    threes = torch.nn.functional.pad(flat, (0, -flat.numel() % 3)).reshape(-1, 3)
    return threes[:, 0] + 6 * threes[:, 1] + 36 * threes[:, 2]


def unpack_places(triples: Tensor, shape: tuple[int, int]) -> Tensor:
    """The places that `pack_places` took, in their shape."""
    threes = torch.stack([triples % 6, triples // 6 % 6, triples // 36], dim=1)
    return threes.reshape(-1)[: shape[0] * shape[1]].reshape(shape)
