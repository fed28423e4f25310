"""The entry of the tile table for a product with M rows."""

from pt2e_quant.kernels.tiles import rows_class

_SLIM = 32


def tile_class(rows: int) -> str:
    """As `rows_class`, but that 17 to 32 rows have tiles of their own.

    A tile of 64 rows issues the instructions of 64, which bound groups of 32 and 64.

    >>> [tile_class(m) for m in (16, 17, 32, 33)]
    ['decode', 'slim', 'slim', 'skinny']
    """
    found = rows_class(rows)
    return "slim" if found == "skinny" and rows <= _SLIM else found
