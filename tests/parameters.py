"""Parameters of tests: what CI runs of the slow ones, and cases that share one lowering."""

from collections.abc import Iterable
from typing import Any

import pytest


def named_subset(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Values of which CI runs those that are kept; the rest is marked slow."""
    values = list(values)
    assert all(value in values for value in kept), "a kept value is none of them"
    return [
        value
        if value in kept
        else pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow
        )
        for value in values
    ]


def in_groups(names: Iterable[str], size: int) -> list[Any]:
    """Lists of names: a model with one result for each is lowered once."""
    names = list(names)
    groups = [names[i : i + size] for i in range(0, len(names), size)]
    return [pytest.param(group, id=", ".join(group)) for group in groups]
