"""Choose a scheme for each group by an integer program, solved by scipy's HiGHS."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from pt2e_quant.core.errors import MissingExtraError

_TIME_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One scheme for one cluster of groups.

    Args:
        scheme: its name.
        noise: noise over signal in the results, if this cluster alone is quantized so; one that is
            infinite (NaN in the results) is never chosen.
        precision: what it costs to give up the recipe: 0 for the recipe itself.
        size: bytes of the weights.
        time_us: of one call, where it was measured.
    """

    scheme: str
    noise: float
    precision: float
    size: float
    time_us: float = 0.0


Menu = Mapping[str, Sequence[Candidate]]
"""By the name of a cluster."""


def least_precision(menu: Menu, *, noise: float) -> dict[str, Candidate] | None:
    """The choice that gives up the recipe least often, its noise together within a bound.

    Of equal ones the one of fewest bytes. None if no choice keeps the bound.
    """
    total = sum(max(c.size for c in options) for options in menu.values()) or 1.0
    bound = max(noise, 1e-30)
    return _solve(
        menu,
        cost=lambda c: c.precision + 1e-3 * c.size / total,
        weight=lambda c: c.noise / bound,
        limit=1.0 if noise > 0 else 0.0,
    )


def least_noise(
    menu: Menu, *, size: float | None = None, time_us: float | None = None
) -> dict[str, Candidate] | None:
    """The choice with the least noise that fits into some bytes, or into some time; None if none.

    Of equal ones the one that gives up the recipe least often.
    """
    noises = [c.noise for options in menu.values() for c in options if isfinite(c.noise)]
    worst = max(noises, default=0.0) or 1.0
    limit = size if size is not None else time_us or 0.0
    return _solve(
        menu,
        cost=lambda c: c.noise / worst + 1e-9 * c.precision,
        weight=lambda c: (c.size if size is not None else c.time_us) / max(limit, 1e-9),
        limit=1.0,
    )


def _solve(menu: Menu, *, cost: Any, weight: Any, limit: float) -> dict[str, Candidate] | None:
    """Minimize a sum of costs under a bound on a sum of weights, one candidate a cluster."""
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array
    except ImportError as error:
        raise MissingExtraError("tune", "scipy") from error
    flat = [(name, candidate) for name, options in menu.items() for candidate in options]
    rows = {name: at for at, name in enumerate(menu)}
    places = [rows[name] for name, _ in flat], range(len(flat))
    one_each = csr_array((np.ones(len(flat)), places), shape=(len(rows), len(flat)))
    weights = np.array([weight(candidate) for _, candidate in flat])
    costs = np.array([cost(candidate) for _, candidate in flat])
    # What breaks the bound alone is left out: coefficients of many sizes upset the solver.
    fits = (weights <= limit) & np.isfinite([candidate.noise for _, candidate in flat])
    found = milp(
        np.where(fits, costs, 0.0),
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, fits.astype(float)),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(np.where(fits, weights, limit)[None], -np.inf, limit),
        ],
        options={"time_limit": _TIME_LIMIT_S, "mip_rel_gap": 1e-6},
    )
    if found.x is None:
        return None
    return {name: c for (name, c), taken in zip(flat, found.x, strict=True) if taken > 0.5}
