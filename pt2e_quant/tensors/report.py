"""The report of `quantize_`: what each module became, and why others stayed float."""

from dataclasses import dataclass, field

_SHOWN = 3
"""How many names of weights that stay float for one reason are printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One weight.

    Args:
        name: in the state dict.
        scheme: what it is quantized to, "" if it stays float.
        layout: the layout of its codes.
        bytes_before: of the float weight.
        bytes_after: of all its parts.
        reason: why it stays float.
    """

    name: str
    scheme: str = ""
    layout: str = ""
    bytes_before: int = 0
    bytes_after: int = 0
    reason: str = ""


@dataclass(slots=True)
class EagerReport:
    """One row for each weight that was looked at, in the order of modules."""

    rows: list[Row] = field(default_factory=list)
    others: list[Row] = field(default_factory=list)
    """Float parameters of two axes and more that nothing asked for, with the reason."""

    @property
    def quantized(self) -> list[Row]:
        """The weights that are quantized now."""
        return [row for row in self.rows if row.scheme]

    @property
    def floats(self) -> list[Row]:
        """The weights that were asked for and stay float."""
        return [row for row in self.rows if not row.scheme]

    def __str__(self) -> str:
        before = sum(row.bytes_before for row in self.quantized)
        after = sum(row.bytes_after for row in self.quantized)
        head = f"{len(self.quantized)} weights quantized: {before:,} -> {after:,} bytes"
        lines = [f"  {row.name}: stays float, {row.reason}" for row in self.floats]
        reasons = dict[str, list[str]]()
        for row in self.others:
            reasons.setdefault(row.reason, []).append(row.name)
        lines += [
            f"  {len(names)} not asked for ({reason}): {', '.join(names[:_SHOWN])}"
            + (", …" if len(names) > _SHOWN else "")
            for reason, names in reasons.items()
        ]
        return "\n".join([head, *lines])
