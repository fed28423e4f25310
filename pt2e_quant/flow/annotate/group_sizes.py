"""The group size of a scheme, and the check that it divides the weights."""

from collections.abc import Sequence

from torch.fx import Node

from pt2e_quant.core.granularity import PerGroup
from pt2e_quant.core.schemes import Scheme, TensorScheme
from pt2e_quant.core.specs import EdgeOrNode

_SIZES = (256, 128, 64, 32, 16)
"""Group sizes that kernels take."""


def group_size_of(scheme: Scheme | None) -> int | None:
    """The group size of a scheme's weights, None for no groups."""
    granularity = scheme.weight.granularity if scheme and scheme.weight else None
    return granularity.group_size if isinstance(granularity, PerGroup) else None


class UndividedError(ValueError):
    """Groups that do not divide a constant: the operator that reads it stays float.

    Args:
        reason: for the report.
        fix: what to ask for instead.
    """

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.fix = fix


def check_groups(scheme: TensorScheme, places: Sequence[EdgeOrNode]) -> None:
    """Check that the group size of a scheme divides the last axis of all places.

    Raises:
        UndividedError: naming the constant and the fix.
    """
    if not isinstance(scheme.granularity, PerGroup):
        return
    group_size, axis = scheme.granularity.group_size, scheme.granularity.axis
    what = "columns" if axis == -1 else f"entries along axis {axis}"
    for place in places:
        source = place if isinstance(place, Node) else place[0]
        columns = source.meta["val"].shape[axis]
        if columns % group_size:
            raise UndividedError(
                f"groups of {group_size} do not divide the {columns} {what} of {source.name}",
                fix=f"give its module a scheme {_nearest(group_size, columns)}, or "
                "quantizer.pad_groups() (--pad-groups)",
            )


def _nearest(group_size: int, columns: int) -> str:
    """The schemes that divide the columns: in the next smaller groups, or of rows."""
    smaller = (size for size in _SIZES if size < group_size and columns % size == 0)
    found = next(smaller, None)
    return f'of groups of {found} ("…_g{found}")' if found else 'of whole rows ("w4", "a8w4", …)'
