"""Checks and arithmetic of qparams under the names that torchao's PT2E gives them."""

import warnings
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.dtypes import info, limits_of
from pt2e_quant.core.errors import Pt2eQuantWarning, RangeError, UnsupportedError
from pt2e_quant.core.qparams import choose_float_qparams, choose_qparams, symmetric_zero_point
from pt2e_quant.observers.placeholder import PlaceholderObserver
from pt2e_quant.observers.qschemes import SYMMETRIC, is_per_channel, is_per_tensor

__all__ = [
    "calculate_qmin_qmax",
    "check_min_max_valid",
    "determine_qparams",
    "get_qparam_dict",
    "to_underlying_dtype",
    "validate_qmin_qmax",
]


def to_underlying_dtype(qdtype: torch.dtype) -> torch.dtype:
    """The dtype of the stored integers: int8 for torch.qint8; float8 stays.

    Raises:
        UnsupportedError: nothing can be quantized to it.
    """
    return limits_of(qdtype).storage


def validate_qmin_qmax(quant_min: int, quant_max: int) -> None:
    """Refuse a range that does not hold 0 or is empty.

    Raises:
        RangeError: with both ends.
    """
    if not quant_min <= 0 <= quant_max or quant_min >= quant_max:
        raise RangeError(
            f"quant_min {quant_min} .. quant_max {quant_max} must be a range that holds 0"
        )


def check_min_max_valid(min_val: Tensor, max_val: Tensor) -> bool:
    """Whether a range has seen data; a warning says so if it has not.

    Raises:
        RangeError: a min is above its max.
    """
    unseen = min_val.numel() == 0 or max_val.numel() == 0
    if unseen or bool(((min_val == torch.inf) & (max_val == -torch.inf)).all()):
        warnings.warn(
            "no data was seen: the scale is 1.0 and the zero_point 0",
            Pt2eQuantWarning,
            stacklevel=2,
        )
        return False
    if not bool((min_val <= max_val).all()):
        raise RangeError(f"min {min_val} is not below max {max_val}")
    return True


def calculate_qmin_qmax(
    quant_min: int,
    quant_max: int,
    has_customized_qrange: bool,
    dtype: torch.dtype,
    reduce_range: bool,
) -> tuple[int, int]:
    """The integers in use: the range given, else the dtype's own, with one bit less if asked.

    Raises:
        RangeError: the range given does not fit in as many integers as the dtype has.
    """
    limits = info(dtype)
    low, high = quant_min, quant_max
    if not has_customized_qrange:
        low, high = limits.quant_min, limits.quant_max
    elif not 0 < high - low + 1 <= 1 << limits.bits:
        raise RangeError(f"quant_min {low} .. quant_max {high} does not fit in {dtype}")
    is_halved = reduce_range and (has_customized_qrange or limits.bits == 8)
    return (low // 2, high // 2) if is_halved else (low, high)


def determine_qparams(
    min_val: Tensor,
    max_val: Tensor,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    eps: Tensor,
    has_customized_qrange: bool,
    qscheme: torch.qscheme = torch.per_tensor_affine,
) -> tuple[Tensor, Tensor]:
    """Scale (float64) and zero_point (int64) of a range, as an observer would choose them.

    Raises:
        RangeError: a min is above its max.
    """
    if not check_min_max_valid(min_val, max_val):
        return torch.ones(1, device=min_val.device), torch.zeros(
            1, dtype=torch.int64, device=min_val.device
        )
    limits = {"quant_min": quant_min, "quant_max": quant_max}
    if qscheme == torch.per_channel_affine_float_qparams:
        scale, zero_point = choose_float_qparams(min_val, max_val, eps=eps, **limits)
    else:
        middle = symmetric_zero_point(
            dtype, quant_min, quant_max, has_own_range=has_customized_qrange
        )
        scale, zero_point = choose_qparams(
            min_val,
            max_val,
            symmetric=qscheme in SYMMETRIC,
            eps=eps,
            zero_point_if_symmetric=middle,
            **limits,
        )
    return scale.to(torch.double), zero_point.to(torch.int64)


def get_qparam_dict(observer_or_fake_quant: Any) -> dict[str, Any]:
    """An observer's qparams by name; symmetric schemes are given as the affine ones.

    Raises:
        UnsupportedError: it has a qscheme that is neither per tensor nor per channel.
    """
    observer = observer_or_fake_quant
    qscheme = getattr(observer, "qscheme", None)
    if not qscheme or isinstance(observer, PlaceholderObserver):
        return {"qscheme": None, "dtype": observer.dtype}
    found: dict[str, Any] = {"qscheme": qscheme, "dtype": observer.dtype}
    if is_per_tensor(qscheme):
        found["qscheme"] = torch.per_tensor_affine
    elif is_per_channel(qscheme):
        found["axis"] = observer.ch_axis
        if qscheme == torch.per_channel_symmetric:
            found["qscheme"] = torch.per_channel_affine
    else:
        raise UnsupportedError(f"{qscheme} is neither per tensor nor per channel")
    found["scale"], found["zero_point"] = observer.calculate_qparams()
    for name in ("quant_min", "quant_max"):
        if hasattr(observer, name):
            found[name] = getattr(observer, name)
    return found
