"""Inputs that a model writes: an artifact's call writes them too, as the float model does."""

from collections.abc import Sequence
from typing import Any

import torch


def write_back(leaves: Sequence[Any], written: Sequence[int], values: Sequence[Any]) -> None:
    """Write into the leaves at these positions what a runtime gave for them."""
    with torch.no_grad():
        for index, value in zip(written, values, strict=True):
            leaves[index].copy_(value)
