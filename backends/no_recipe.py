"""What to say of a name that is no recipe: a scheme without kernels, or no scheme at all."""

from collections.abc import Mapping

from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.core.granularity import PerGroup
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import Scheme

__all__ = ["no_recipe"]


def no_recipe(backend: str, name: str, recipes: Mapping[str, Scheme]) -> ConfigError:
    """The error for a recipe that a backend does not have, with the nearest that it has.

    Args:
        backend: as people write it.
        name: what was asked for.
        recipes: those there are, with their schemes.
    """
    try:
        wanted = scheme_named(name)
    except ConfigError:
        return ConfigError(f'{backend} has no recipe "{name}": {near(name, recipes)}')
    nearest = min(recipes, key=lambda known: _distance(recipes[known], wanted))
    return ConfigError(
        f'{backend} has no kernel for scheme "{name}"',
        fix=f'the nearest it runs is "{nearest}"',
    )


def _distance(ours: Scheme, wanted: Scheme) -> tuple[int, bool, int, bool, int]:
    """How far a recipe's scheme is: activations first, then bits, not fewer, then groups."""
    kinds = [_activation_kind(scheme) for scheme in (ours, wanted)]
    a, b = ours.weight, wanted.weight
    assert a is not None  # every recipe has weights
    assert b is not None
    sizes = [w.granularity for w in (a, b)]
    groups = [size.group_size if isinstance(size, PerGroup) else 0 for size in sizes]
    return (
        abs(kinds[0] - kinds[1]),
        a.bits < b.bits,
        abs(a.bits - b.bits),
        (a.format is None) != (b.format is None),
        abs(groups[0] - groups[1]),
    )


def _activation_kind(scheme: Scheme) -> int:
    """0 for float activations, 1 for those quantized at run time, 2 for calibrated ones."""
    if scheme.input is None:
        return 0
    return 1 if scheme.input.is_dynamic else 2
