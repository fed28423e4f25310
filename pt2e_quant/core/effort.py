"""How much is tried out on calibration data to choose the ranges of activations."""

from enum import StrEnum

from pt2e_quant.core.errors import ConfigError, near


class Effort(StrEnum):
    """How much a conversion tries out on calibration data.

    Attributes:
        FAST: each range is what its observer says.
        BALANCED: several ranges are compared for each tensor, in a few runs of the model.
        BEST: afterwards the ranges are also varied one by one, each time by a run of the model.
    """

    FAST = "fast"
    BALANCED = "balanced"
    BEST = "best"


def effort_named(name: str) -> Effort:
    """The effort of a name.

    >>> effort_named("best")
    <Effort.BEST: 'best'>

    Raises:
        ConfigError: there is none; near names are offered.
    """
    try:
        return Effort(name)
    except ValueError as error:
        raise ConfigError(f'there is no effort "{name}": {near(name, list(Effort))}') from error
