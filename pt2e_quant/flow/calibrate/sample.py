"""A sample call kept from calibration, and the distance between two results."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.inexact import as_reals, is_inexact
from pt2e_quant.core.read_capture import capture_of

SAMPLE_KEY = "pt2e_quant.sample"
"""The key of `gm.meta` that holds a Sample."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One call's inputs in placeholder order, and what the float graph returned for it.

    Args:
        leaves: the inputs, copied.
        float_outputs: flat outputs of the float graph; None if it was not run on them.
    """

    leaves: tuple[Any, ...]
    float_outputs: tuple[Any, ...] | None

    @staticmethod
    def keep(leaves: Sequence[Any], outputs: Any) -> "Sample":
        """Copy a call and its result."""
        return Sample(
            leaves=tuple(copied(leaves)),
            float_outputs=tuple(_copied(v) for v in pytree.tree_leaves(outputs)),
        )


def copied(leaves: Sequence[Any]) -> list[Any]:
    """A call's leaves for a graph that may write into them."""
    return [_copied(leaf) for leaf in leaves]


def sample_of(gm: GraphModule) -> Sample:
    """The sample of calibration, else seeded noise of the captured shapes without float outputs."""
    found = gm.meta.get(SAMPLE_KEY)
    if isinstance(found, Sample):
        return found
    return Sample(leaves=tuple(_noise(capture_of(gm))), float_outputs=None)


def sqnr_db(reference: Any, found: Any) -> float:
    """Signal to quantization noise ratio of all float and complex tensors of two results, in dB.

    10 log10(sum reference² / sum (reference - found)²) over the finite values of the reference;
    inf if they are equal, -inf without signal or if one is infinite where the reference is finite,
    nan if the two differ in structure or one is NaN where the reference is finite.
    """
    signal = noise = 0.0
    a, b = pytree.tree_leaves(reference), pytree.tree_leaves(found)
    if len(a) != len(b):
        return math.nan
    for x, y in zip(a, b, strict=True):
        if not is_inexact(x):
            continue
        if not isinstance(y, Tensor) or x.shape != y.shape or x.is_complex() != y.is_complex():
            return math.nan
        left, right = as_reals(x).double(), as_reals(y).double()
        finite = left.isfinite() & (left.abs() < torch.finfo(torch.float32).max / 2)
        signal += float(left[finite].square().sum())
        noise += float((left - right)[finite].square().sum())
    if noise == 0:
        return math.inf
    if signal == 0 or noise == math.inf:
        return -math.inf
    return 10 * math.log10(signal / noise)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _noise(capture: Capture) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    args, kwargs = capture.example_inputs()
    return [
        torch.randn(v.shape, generator=generator).to(v.dtype).to(v.device)
        if isinstance(v, Tensor) and v.is_floating_point()
        else (v + 1 if isinstance(v, Tensor) and v.dtype != torch.bool else v)
        for v in pytree.tree_leaves((args, kwargs), is_leaf=lambda x: x is None)
    ]
