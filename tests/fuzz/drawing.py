"""A program while it is drawn: each statement is run on real tensors before it is kept."""

import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fuzz.program import Input, Step

__all__ = ["Drawing"]

LARGEST = 20_000
"""Elements of a value: a model is to take milliseconds."""


class Drawing:
    """What has been drawn so far, and the values it has at two sets of sizes.

    Args:
        rng: every choice comes from it.
        dtype: of the parameters and of float values.
    """

    def __init__(self, rng: random.Random, dtype: torch.dtype) -> None:
        self.rng = rng
        self.dtype = dtype
        self.inputs: list[Input] = []
        self.steps: list[Step] = []
        self.attributes: dict[str, tuple[str, ...]] = {}
        self.environments: list[dict[str, Any]] = []
        self.holder = nn.Module()
        self.pending: list[str] = []
        self.bound = {torch.float16: 6e3}.get(dtype, 1e13)

    # Choices

    def integer(self, low: int, high: int) -> int:
        """An integer of low to high, both included."""
        return self.rng.randint(low, high)

    def choice(self, *options: Any) -> Any:
        """One of the options."""
        return self.rng.choice(options)

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def number(self) -> float:
        """A literal: mostly of size one, sometimes of any size."""
        if self.chance(0.1):
            return float(f"{10 ** self.rng.uniform(-6, 6):.1e}")
        return self.choice(0.5, 1.5, -1.0, 2.0, 0.1, -0.3, 3.0, 0.0, 1.0)

    def width(self) -> int:
        """A number of channels: powers of two, odd numbers, one."""
        return self.choice(1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 10, 12, 13, 16, 16, 17, 20, 24, 32, 33, 48)

    # Values

    def value(self, fits: Callable[[Tensor], bool], *, is_float: bool = True) -> str | None:
        """The name of a value that fits, later ones more often; None where there is none."""
        names = [
            name
            for name, value in self.environments[0].items()
            if isinstance(value, Tensor) and value.is_floating_point() is is_float and fits(value)
        ]
        if not names:
            return None
        weights = [2.2 ** min(index, 60) for index in range(len(names))]
        return self.rng.choices(names, weights)[0]

    def ranked(self, *ranks: int) -> str | None:
        """A float value of one of these numbers of dimensions, not empty."""
        return self.value(lambda v: v.dim() in ranks and v.numel() > 0)

    def of(self, name: str) -> Tensor:
        """The value of a name at the example's sizes."""
        value = self.environments[0][name]
        assert isinstance(value, Tensor)
        return value

    def size(self, name: str, axis: int) -> int | None:
        """The size along an axis, None where it is dynamic."""
        sizes = {env[name].shape[axis] for env in self.environments}
        return sizes.pop() if len(sizes) == 1 else None

    def attribute(self, letter: str, *lines: str) -> str:
        """Make an attribute of the model; `{0}` in the lines is its name."""
        name = f"{letter}{len(self.attributes)}"
        made = tuple(line.format(f"self.{name}") for line in lines)
        scope = {"self": self.holder, "torch": torch, "nn": nn, "F": F}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for line in made:
                exec(line, scope)
            self.holder.eval().to(self.dtype)
        self.attributes[name] = made
        self.pending.append(name)
        return f"self.{name}"

    # Statements

    def add_input(self, item: Input, sizes: list[dict[str, int]]) -> None:
        """Make an input at each of the sizes."""
        while len(self.environments) < len(sizes):
            self.environments.append({})
        for env, chosen in zip(self.environments, sizes, strict=True):
            env[item.name] = eval(item.text, {"torch": torch, "F": F, **chosen})
        self.inputs.append(item)

    def add(self, text: str, *, writes: bool = False) -> str | None:
        """Keep a statement if it runs at all sizes and gives usable values.

        Returns:
            The name of its value ("" for a write), None where it was not kept.
        """
        found: list[Any] = []
        scope = {"self": self.holder, "torch": torch, "nn": nn, "F": F}
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for env in self.environments:
                    if writes:
                        exec(text, {**scope, **env})
                    else:
                        found.append(eval(text, {**scope, **env}))
        except Exception:  # Whatever torch raises: this statement is no statement of a model.
            found = [None]
        if writes and found != [None]:
            self.pending = []
            self.steps.append(Step(target="", text=text))
            return ""
        if not found or not all(self._is_usable(value) for value in found):
            self.drop_pending()
            return None
        self.pending = []
        name = f"v{len(self.steps)}"
        for env, value in zip(self.environments, found, strict=True):
            env[name] = value
        self.steps.append(Step(target=name, text=text))
        return name

    def drop_pending(self) -> None:
        """Remove the attributes that no kept statement reads."""
        for name in self.pending:
            del self.attributes[name]
            delattr(self.holder, name)
        self.pending = []

    def _is_usable(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.numel() > LARGEST or value.dim() > 6:
            return False
        if not value.is_floating_point() or value.numel() == 0:
            return not value.is_complex()
        if value.dtype != self.dtype and self.dtype != torch.float32:
            return False
        largest = float(value.detach().abs().max())
        return math.isfinite(largest) and largest < self.bound
