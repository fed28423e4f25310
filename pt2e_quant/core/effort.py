"""The effort spent on calibration data to choose ranges and weights."""

from enum import StrEnum

from pt2e_quant.core.errors import ConfigError, near


class Effort(StrEnum):
    """The effort that a conversion spends on calibration data.

    Attributes:
        FAST: each range is what its observer says, weights are rounded to the nearest integers, and
            biases stay.
        BALANCED: several ranges are compared for each tensor, integers of weights are chosen by the
            output error of their layers, and mean errors corrected, in a few runs of the model.
        BEST: integers are chosen with more time, and more is corrected, which stays where the whole
            model gains by it.
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
