"""Fallbacks of quantized tensors to real values: recorded, or refused under `strict`."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from pt2e_quant.core.errors import UnsupportedError

_STRICT: ContextVar[bool] = ContextVar("pt2e_quant_tensors_strict", default=False)
_RECORD: Counter[tuple[str, str]] = Counter()


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Within it, an operation that no quantized form has is an error.

    >>> import torch
    >>> from pt2e_quant.core.scheme_names import scheme_named
    >>> from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
    >>> weight = QuantizedTensor.from_float(torch.eye(4), scheme_named("w8").weight)
    >>> with strict():
    ...     weight.sin()
    Traceback (most recent call last):
    pt2e_quant.core.errors.UnsupportedError: aten.sin.default of a quantized tensor: it has no ...
    """
    token = _STRICT.set(True)
    try:
        yield
    finally:
        _STRICT.reset(token)


def note_fallback(op: str, reason: str) -> None:
    """Record that an operation works on real values.

    Raises:
        UnsupportedError: under `strict`.
    """
    if _STRICT.get():
        raise UnsupportedError(
            f"{op} of a quantized tensor: {reason}",
            fix="call dequantize() where real values are meant, or leave strict()",
        )
    _RECORD[op, reason] += 1


def note_operator(func: Any) -> None:
    """Record that an operator works on real values.

    Raises:
        UnsupportedError: under `strict`; or it is a collective, which goes on writing into memory
            after it has returned, where real values of a quantized tensor do not live so long.
    """
    if func.namespace == "c10d":
        raise UnsupportedError(
            f"{func} is not done on a quantized tensor",
            fix="training.quantize_parameters makes parameters that are sharded; or communicate "
            "dequantize()",
        )
    note_fallback(str(func), "it has no quantized form")


def fallbacks() -> dict[tuple[str, str], int]:
    """Return the count of operations on real values, by (operation, reason)."""
    return dict(_RECORD)


def forget_fallbacks() -> None:
    """Empty the record."""
    _RECORD.clear()
