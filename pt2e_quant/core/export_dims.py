"""Dynamic dimensions of a call: the range of each, and what `torch.export` is given for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pt2e_quant.core.size_expression import linear_form


@dataclass(frozen=True, slots=True, kw_only=True)
class DimRange:
    """The range of one dynamic dimension; `maximum` None is unbounded; `hint` is the sample's.

    Args:
        multiple: what every size is a multiple of, as torch.export found for a `Dim.AUTO`.
    """

    minimum: int
    maximum: int | None
    hint: int
    multiple: int = 1

    def smallest(self) -> int:
        """The smallest size, at least 1."""
        return max(-(-self.minimum // self.multiple), 1) * self.multiple

    def up_to(self, size: int) -> int:
        """The largest size that is at most `size`, or the smallest."""
        most = size if self.maximum is None else min(size, self.maximum)
        return max(most // self.multiple * self.multiple, self.smallest())


def dim_of(symbol: str, limits: DimRange, is_loose: bool) -> Any:
    """A dimension with the limits of a symbol."""
    least = limits.minimum or None
    if is_loose:
        return torch.export.Dim.AUTO(min=least, max=limits.maximum)
    return torch.export.Dim(f"dim_{symbol}", min=least, max=limits.maximum)


def derived_dim(size: str, dims: Mapping[str, Any]) -> Any:
    """`2 * Dim + 1` of the size "2*s0 + 1"; torch is to find other relations again."""
    form = linear_form(size)
    if form is None or not isinstance(dims.get(form[0]), torch.export.Dim):
        return torch.export.Dim.AUTO
    symbol, factor, summand = form
    multiple = factor * dims[symbol] if factor > 1 else dims[symbol]
    return multiple + summand if summand else multiple


class _Auto:
    """Prints as the name to paste."""

    def __repr__(self) -> str:
        return "torch.export.Dim.AUTO"


AUTO = _Auto()
"""`torch.export.Dim.AUTO`, printed as the name to paste."""
