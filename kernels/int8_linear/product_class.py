"""The shape class of a linear: its entry in the tables of tiles and of measured speeds."""

from pt2e_quant.kernels.tiles import rows_class

_NARROW = 2048


def product_class(rows: int, columns: int) -> str:
    """The class by the rows of the product; of few rows and columns, tiles leave processors idle.

    >>> [product_class(1, 1024), product_class(1, 4096), product_class(300, 1024)]
    ['decode_narrow', 'decode', 'large']
    """
    name = rows_class(rows)
    return "decode_narrow" if name == "decode" and columns <= _NARROW else name
