"""Codes of a table of real values, and tables fitted to data by k-means."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.blocks import from_rows, grid_shape, spread, to_rows

_ROUNDS = 30
_BINS = 512


def check_table(shape: Sequence[int], table: Tensor, block: Sequence[int]) -> None:
    """Check that a table is one for all blocks, [K], or one for each, [*grid, K].

    Raises:
        ConfigError: it is neither.
    """
    grid = grid_shape(shape, block)
    if table.dim() != 1 and tuple(table.shape[:-1]) != grid:
        raise ConfigError(
            f"a code book is [K], or [{', '.join(map(str, grid))}, K] for blocks of {list(block)}; "
            f"found {list(table.shape)}"
        )


def encode_table(scaled: Tensor, table: Tensor, block: Sequence[int]) -> Tensor:
    """The place of the nearest value in the table, the lower of two equally near ones.

    Args:
        scaled: float32, in units of the table. A NaN has no code: it becomes the last.
        table: float32[K], rising, or [*grid, K].
        block: which elements share a table, where each block has its own.

    Returns:
        uint8, shaped like scaled.
    """
    middles = (table[..., 1:] + table[..., :-1]) / 2
    if table.dim() == 1:
        return torch.bucketize(scaled.contiguous(), middles.contiguous()).to(torch.uint8)
    rows = to_rows(scaled, block).contiguous()
    codes = torch.searchsorted(middles.reshape(rows.shape[0], -1).contiguous(), rows)
    return from_rows(codes.to(torch.uint8), scaled.shape, block)


def decode_table(codes: Tensor, table: Tensor, block: Sequence[int]) -> Tensor:
    """The table's values at the codes, shaped like codes."""
    if table.dim() == 1:
        return table[codes.to(torch.int64)]
    size = table.shape[-1]
    first = torch.arange(0, table.numel(), size, device=table.device).reshape(table.shape[:-1])
    return table.reshape(-1)[spread(first, codes.shape, block) + codes]


def fit_tables(rows: Tensor, size: int) -> Tensor:
    """The `size` values of least squared error for each row, rising: float32[R, size].

    Lloyd's k-means in one dimension, from values as dense as the cube root of the data's density
    (Panter and Dite, 1951); no random numbers. A cluster that holds nothing keeps its value. A row
    of fewer different values repeats some.
    """
    ordered = rows.to(torch.float32).contiguous().sort(dim=1).values.contiguous()
    count = ordered.shape[1]
    centres = _start(ordered, size)
    # float64: sums of clusters are differences of running sums.
    running = torch.nn.functional.pad(ordered.to(torch.float64).cumsum(1), (1, 0))
    for _ in range(_ROUNDS):
        middles = (centres[:, 1:] + centres[:, :-1]) / 2
        inner = torch.searchsorted(ordered, middles.contiguous(), right=True)
        edges = torch.nn.functional.pad(inner, (1, 0))
        edges = torch.nn.functional.pad(edges, (0, 1), value=count)
        sums = running.gather(1, edges).diff(dim=1)
        held = edges.diff(dim=1)
        means = (sums / held.clamp(min=1)).to(torch.float32)
        centres = torch.where(held > 0, means, centres).sort(dim=1).values
    return centres


def _start(ordered: Tensor, size: int) -> Tensor:
    """Values spread over sorted rows by the cube root of a histogram; the data itself if few."""
    count = ordered.shape[1]
    evenly = (torch.arange(size, device=ordered.device) + 0.5) / size
    if count <= size:
        return ordered[:, (evenly * count).to(torch.int64)].contiguous()
    low, width = ordered[:, :1], ordered[:, -1:] - ordered[:, :1]
    bins = torch.linspace(0, 1, min(_BINS, count) + 1, device=ordered.device)
    edges = low + width * bins
    held = torch.searchsorted(ordered, edges.contiguous(), right=True).diff(dim=1)
    share = held.to(torch.float32).pow(1 / 3).cumsum(1)
    total = share[:, -1:].clamp(min=1.0)
    wanted = (evenly * total).contiguous()
    place = torch.searchsorted(share.contiguous(), wanted).clamp(max=bins.numel() - 2)
    return low + width * (bins[place] + bins[place + 1]) / 2
