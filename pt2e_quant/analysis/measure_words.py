"""Words that tell measures apart: a metric or a loss that computes something else has others."""

from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any


def measure_words(measure: object) -> str:
    """What a metric or loss is, in the same words in another process.

    Of a Python function: its name, its code and that of the functions in it, its defaults, and
    the values that it closes over. Of an object: its class and its state. A value whose text holds
    an address has other words each time. What a function reads of its module is not looked at.
    """
    return " ".join(_words(measure))


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, partial):
        yield "partial"
        yield from _words(value.func)
        yield from _each([*value.args, *value.keywords.items()])
    elif isinstance(value, MethodType):
        yield from _words(value.__func__)
        yield from _words(value.__self__)
    elif isinstance(value, FunctionType):
        yield value.__qualname__
        yield from _code(value.__code__)
        yield from _each(value.__defaults__ or ())
        yield from _each((value.__kwdefaults__ or {}).items())
        for cell in value.__closure__ or ():
            try:
                yield from _each([cell.cell_contents])
            except ValueError:  # not set yet
                yield "empty"
    else:
        yield getattr(value, "__qualname__", type(value).__name__)
        if hasattr(value, "__dict__") and not isinstance(value, type):
            yield from _each(vars(value).items())


def _each(values: Any) -> Iterator[str]:
    for value in values:
        is_callable = isinstance(value, (partial, MethodType, FunctionType))
        listed = value.tolist() if hasattr(value, "tolist") else value  # not cut as in its text
        yield from _words(value) if is_callable else [repr(listed)]


def _code(code: CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names}"
    for constant in code.co_consts:
        if isinstance(constant, frozenset):  # whose order is another one in each process
            constant = sorted(map(repr, constant))
        yield from _code(constant) if isinstance(constant, CodeType) else [repr(constant)]
