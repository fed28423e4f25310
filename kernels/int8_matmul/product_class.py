"""The shape class of a product: its entry in the tables of tiles and of measured speeds."""

from pt2e_quant.kernels.tiles import rows_class

_NARROW = 64


def product_class(rows: int, columns: int) -> str:
    """The class by the rows of one matrix of the result; with many rows, by its columns too.

    >>> [product_class(1, 64), product_class(2048, 64), product_class(2048, 128)]
    ['decode', 'large_narrow', 'large']
    """
    name = rows_class(rows)
    return f"{name}_narrow" if name == "large" and columns <= _NARROW else name
