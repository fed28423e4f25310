"""The shape class of a tensor that is quantized as a whole: the row of its tile tables."""

from pt2e_quant.kernels.tiles import elements_class

__all__ = ["shape_class"]

_ONE = 8192


def shape_class(elements: int) -> str:
    """By the elements: so few that one program holds them need no second launch.

    >>> [shape_class(n) for n in (4096, 8193, 2**20)]
    ['one', 'small', 'large']
    """
    return "one" if elements <= _ONE else elements_class(elements)
