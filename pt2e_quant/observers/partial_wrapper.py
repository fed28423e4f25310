"""Constructors with some arguments given beforehand: what ``Observer.with_args`` makes."""

from collections.abc import Callable
from functools import partial
from typing import Any


class PartialWrapper:
    """A constructor with some of its arguments given; it makes a new object at each call."""

    def __init__(self, p: Callable[..., Any]) -> None:
        self.p = p
        self.callable_args: dict[str, Callable[[], Any]] = {}

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Construct; an argument given here wins over the one given before."""
        made = {name: make() for name, make in self.callable_args.items() if name not in keywords}
        return self.p(*args, **{**keywords, **made})

    def __repr__(self) -> str:
        return repr(self.p) + repr(self.callable_args)

    def with_args(self, **kwargs: Any) -> "PartialWrapper":
        """A constructor with further arguments given."""
        return PartialWrapper(partial(self, **kwargs))

    def with_callable_args(self, **kwargs: Callable[[], Any]) -> "PartialWrapper":
        """A constructor with further arguments, each made by a call at construction."""
        wrapper = PartialWrapper(self.p)
        wrapper.callable_args = {**self.callable_args, **kwargs}
        return wrapper


def given_argument(constructor: Any, name: str) -> Any:
    """A keyword argument that a constructor was given beforehand, None if it was not."""
    while constructor is not None and not isinstance(constructor, type):
        found = getattr(constructor, "keywords", {}).get(name)
        if found is not None:
            return found
        constructor = getattr(constructor, "p", None) or getattr(constructor, "func", None)
    return None
