"""The fake values of a graph, as pickles: sizes, types and symbols, no fake mode of torch's own."""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Reduced = tuple[Any, tuple[Any, ...]]
"""A function and its arguments, as `__reduce__` returns them."""

# What is known of symbols. Sources, guards and stacks of the trace stay behind: nothing asks for
# them once a program is captured.
_SYMBOLS = (
    "var_to_range",
    "backed_var_to_val",
    "var_to_val",
    "replacements",
    "size_like",
    "divisible",
    "unbacked_symint_counter",
    "frozen",
)


class FakeValues:
    """The mode that a module's fake values live in, and its symbols.

    All graphs of one module share one, so that they still share a mode when they are loaded.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode

    def __reduce__(self) -> Reduced:
        """By the symbols' ranges, samples and relations."""
        env = self.mode.shape_env
        known = None if env is None else {k: v for k, v in vars(env).items() if k in _SYMBOLS}
        return _load_values, (known,)


_VALUES: WeakKeyDictionary[FakeTensorMode, FakeValues] = WeakKeyDictionary()


def values_of(mode: FakeTensorMode) -> FakeValues:
    """The one FakeValues of a mode."""
    return _VALUES.setdefault(mode, FakeValues(mode))


def _load_values(known: dict[str, Any] | None) -> FakeValues:
    env = None
    if known is not None:
        env = ShapeEnv()
        for name, value in known.items():
            if name in vars(env):  # another version of torch may not know it
                setattr(env, name, value)
    return values_of(FakeTensorMode(shape_env=env, allow_non_fake_inputs=True))


@dataclass(frozen=True, slots=True)
class _Shape:
    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


def reduce_value(value: object, values: FakeValues) -> Reduced | None:
    """How to pickle a fake tensor or a symbolic number; None for anything else."""
    if isinstance(value, FakeTensor):
        sizes, strides = tuple(value.shape), value.stride()
        return _load_tensor, (values, _Shape(sizes, strides, value.dtype, value.device))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        node = value.node
        hint = node.hint if node.has_hint() else None
        return _load_number, (values, type(value), node.expr, node.pytype, hint)
    return None


def _load_tensor(values: FakeValues, shape: _Shape) -> Tensor:
    if all(type(size) is int for size in (*shape.sizes, *shape.strides)):
        empty = torch.empty_strided(shape.sizes, shape.strides, dtype=shape.dtype, device="meta")
        return FakeTensor(values.mode, empty, shape.device)
    env = values.mode.shape_env
    assert env is not None, "a dynamic size has a symbol"
    with values.mode, env.suppress_guards():
        return torch.empty_strided(
            shape.sizes, shape.strides, dtype=shape.dtype, device=shape.device
        )


def _load_number(values: FakeValues, kind: Any, expr: Any, pytype: type, hint: Any) -> Any:
    return kind(SymNode(expr, values.mode.shape_env, pytype, hint))
