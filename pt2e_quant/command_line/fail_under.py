"""--fail-under: the figure that a command judges, for CI."""

import math
from typing import Annotated

import typer
from rich.console import Console

from pt2e_quant.command_line.number_options import finite
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.flow.report.report import Report

FailUnder = Annotated[
    float | None,
    typer.Option(help="Exit with 1 if the figure is below this; for CI.", callback=finite),
]


def check_figure(figure: float, least: float | None, name: str) -> None:
    """Exit with 1 where a figure is too low, or is no number.

    Args:
        figure: what the command found.
        least: of --fail-under; None where it was not given.
        name: what the figure is.
    """
    if least is not None and not figure >= least:
        Console(stderr=True, soft_wrap=True).print(
            f"{name} is {figure:.9g}, below --fail-under {least:.9g}"
        )
        raise typer.Exit(1)


def check_report(report: Report, least: float | None) -> None:
    """Exit with 1 where the quantized graph was too far from the float model.

    Raises:
        ConfigError: there is a bound, and the report does not say how far it was.
    """
    if least is None:
        return
    if report.sqnr_float_db is None:
        raise ConfigError(
            "--fail-under judges the SQNR against the float model, which is not known here",
            fix="pt2e-quant compare FILE --against model.pt2 --inputs data.npz --fail-under …",
        )
    check_figure(report.sqnr_float_db, least, "the SQNR against the float model in dB")


def decibels(cost: float) -> float:
    """Noise over signal, as powers, in dB; the larger, the better.

    >>> decibels(0.001)
    30.0
    """
    return -10 * math.log10(cost) if cost > 0 else math.inf
