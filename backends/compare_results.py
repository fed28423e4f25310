"""Two results of one call, compared value by value: floats by SQNR, all else for equality."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.inexact import as_reals, is_inexact
from pt2e_quant.core.leaf_paths import leaf_paths
from pt2e_quant.flow.calibrate.sample import sqnr_db

Results: TypeAlias = Mapping[str, Any]
"""The results of a call: each leaf of its result and each buffer that it wrote, by name."""

_HUGE = torch.finfo(torch.float32).max / 2
"""Floats from here on stand for infinity: masks are written with the largest finite number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The error of one value against the expected one.

    Args:
        ratio_db: SQNR of a float tensor, inf for all else; nan if the two cannot be compared.
        wrong: the number of elements that differ, of a value that is no float tensor.
        total: the number of its elements.
        problem: why the two cannot be compared, "" if they can.
    """

    ratio_db: float = math.inf
    wrong: int = 0
    total: int = 1
    problem: str = ""


def name_results(capture: Capture, leaves: Sequence[Any]) -> dict[str, Any]:
    """Name each leaf of a result by its place: `result`, `result[1]`, `result['logits']`.

    Leaves beyond the captured ones, or a number that does not fit, are named by their index.
    """
    names: list[str] = []
    if len(leaves) == capture.out_spec.num_leaves:
        tree = capture.unflatten_output(range(len(leaves)))
        paths = dict(zip(pytree.tree_leaves(tree), leaf_paths(tree) or (), strict=False))
        names = ["result" + pytree.keystr(paths[i]) for i in range(len(leaves)) if i in paths]
    if len(names) != len(leaves):
        names = [f"result leaf {i}" for i in range(len(leaves))]
    return dict(zip(names, leaves, strict=True))


def compare(expected: Any, found: Any) -> Difference:
    """Return the error of a found value against an expected one."""
    if not isinstance(expected, Tensor):
        return _compare_numbers(expected, found)
    if not isinstance(found, Tensor):
        return _incomparable(f"a {type(found).__name__} instead of a tensor")
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return _incomparable(
            f"{_shown(found)} instead of {_shown(expected)}",
        )
    if expected.layout != torch.strided:
        return Difference()
    there, here = as_reals(expected).cpu(), as_reals(found).cpu()
    if not is_inexact(expected):
        wrong = int((there != here).sum())
        return Difference(wrong=wrong, total=expected.numel())
    if not torch.equal(there.isnan(), here.isnan()):
        return _incomparable("NaN in other places")
    if not torch.equal(_infinite(there), _infinite(here)):
        return _incomparable("infinity in other places")
    finite = (there.abs() < _HUGE) & ~there.isnan()
    return Difference(ratio_db=sqnr_db(there[finite], here[finite]), total=expected.numel())


def _compare_numbers(expected: Any, found: Any) -> Difference:
    if isinstance(found, Tensor) and found.numel() == 1:
        found = found.item()
    if isinstance(expected, float) and isinstance(found, float):
        pair = (torch.tensor(v, dtype=torch.float64) for v in (expected, found))
        return compare(*pair)
    return Difference(wrong=int(bool(expected != found)))


def _incomparable(problem: str) -> Difference:
    return Difference(ratio_db=math.nan, problem=problem)


def _infinite(value: Tensor) -> Tensor:
    """-1, 0 or 1 for each element: whether it stands for an infinity, and which."""
    return ((value >= _HUGE).int() - (value <= -_HUGE).int()) * ~value.isnan()


def _shown(value: Tensor) -> str:
    dtype = str(value.dtype).removeprefix("torch.")
    return f"{dtype}[{', '.join(str(s) for s in value.shape)}]"
