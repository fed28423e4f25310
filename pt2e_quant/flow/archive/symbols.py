"""Symbolic sizes and fake values as JSON, and back into one fake mode with one table of symbols."""

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.read_capture import sampled_sizes

_HEADS = {
    **{
        name: getattr(functions, name)
        for name in functions.__all__
        if isinstance(getattr(functions, name), type)
    },
    **{
        name: getattr(functions, name)
        for name in ("Max", "Min")
        if isinstance(getattr(functions, name, None), type)
    },
    **{
        head.__name__: head
        for head in (
            sympy.Add, sympy.Mul, sympy.Pow, sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt,
            sympy.Ge, sympy.And, sympy.Or, sympy.Not,
        )
    },
}  # fmt: skip
"""The functions of size expressions; anything else is refused both ways."""

_KINDS = {
    "int": (torch.SymInt, int),
    "float": (torch.SymFloat, float),
    "bool": (torch.SymBool, bool),
}


class FakeWriter:
    """Writes fake values, and collects the symbols in them."""

    def __init__(self) -> None:
        self.symbols: dict[str, dict[str, Any]] = {}

    def tensor(self, value: Tensor) -> dict[str, Any]:
        """A fake tensor's type, sizes and strides."""
        return {
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [self.size(s) for s in value.shape],
            "stride": [self.size(s) for s in value.stride()],
            "device": str(value.device),
        }

    def size(self, value: Any) -> Any:
        """A size: a number as it is, a symbolic one as [kind, expression, hint]."""
        if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value
        node = value.node
        kind = next(name for name, (cls, _) in _KINDS.items() if isinstance(value, cls))
        hint = node.hint if node.has_hint() else None
        return [kind, self._expression(node.expr, node.shape_env), hint]

    def _expression(self, expr: Any, env: ShapeEnv) -> Any:
        if isinstance(expr, sympy.Symbol):
            self._note(expr, env)
            return ["Symbol", str(expr)]
        if expr in (sympy.true, sympy.false):
            return bool(expr)
        if expr in (int_oo, -int_oo):
            return ["Infinity", 1 if expr is int_oo else -1]
        if expr.is_Integer:
            return int(expr)
        if expr.is_Rational:
            return ["Rational", int(expr.p), int(expr.q)]
        if expr.is_Float:
            return float(expr)
        name = type(expr).__name__
        if _HEADS.get(name) is not type(expr):
            raise UnsupportedError(
                f"the size expression {expr} has a function that a file cannot hold: {name}",
                fix="export the model with simpler dynamic shapes",
            )
        return [name, *(self._expression(a, env) for a in expr.args)]

    def _note(self, symbol: Any, env: ShapeEnv) -> None:
        name = str(symbol)
        if name in self.symbols:
            return
        self.symbols[name] = {}  # a range may not name it again
        hints = sampled_sizes(env)
        limits = env.var_to_range.get(symbol)
        entry: dict[str, Any] = {
            "integer": bool(symbol.is_integer),
            "positive": bool(symbol.is_positive),
            "nonnegative": bool(symbol.is_nonnegative),
            "size_like": symbol in getattr(env, "size_like", ()),
        }
        if symbol in hints:
            entry["hint"] = self._expression(sympy.sympify(hints[symbol]), env)
        if limits is not None:
            entry["range"] = [self._expression(v, env) for v in (limits.lower, limits.upper)]
        self.symbols[name] = entry


class FakeReader:
    """Makes fake values in one mode.

    Args:
        symbols: as a `FakeWriter` collected them.
    """

    def __init__(self, symbols: Mapping[str, Mapping[str, Any]]) -> None:
        self.env = ShapeEnv() if symbols else None
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self._symbols = {name: _symbol(name, entry) for name, entry in symbols.items()}
        for name, entry in symbols.items():
            self._declare(self._symbols[name], entry)

    def _declare(self, symbol: Any, entry: Mapping[str, Any]) -> None:
        assert self.env is not None
        if "range" in entry:
            low, high = (self._expression(v) for v in entry["range"])
            self.env.var_to_range[symbol] = ValueRanges(low, high)
        if "hint" in entry:
            sampled_sizes(self.env)[symbol] = self._expression(entry["hint"])
        if entry["size_like"]:
            self.env.size_like.add(symbol)

    def tensor(self, entry: Mapping[str, Any]) -> Tensor:
        """A fake tensor of an entry that `FakeWriter.tensor` gave."""
        shape, stride = ([self.size(v) for v in entry[key]] for key in ("shape", "stride"))
        dtype, device = getattr(torch, entry["dtype"]), torch.device(entry["device"])
        if all(type(v) is int for v in (*shape, *stride)):
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            return FakeTensor(self.mode, empty, device)
        assert self.env is not None
        with self.mode, self.env.suppress_guards():
            return torch.empty_strided(shape, stride, dtype=dtype, device=device)

    def size(self, value: Any) -> Any:
        """A number of what `FakeWriter.size` gave."""
        if not isinstance(value, list):
            return value
        kind, expression, hint = value
        symbolic, plain = _KINDS[kind]
        made: Any = symbolic
        return made(SymNode(self._expression(expression), self.env, plain, hint))

    def _expression(self, value: Any) -> Any:
        if not isinstance(value, list):
            return sympy.sympify(value) if isinstance(value, (bool, int, float)) else _refuse(value)
        head, *args = value
        if head == "Symbol":
            return self._symbols[args[0]]
        if head == "Infinity":
            return int_oo if args[0] > 0 else -int_oo
        if head == "Rational":
            return sympy.Rational(int(args[0]), int(args[1]))
        parts = [self._expression(a) for a in args]
        # Not evaluated anew: what was written had been simplified.
        return (
            _HEADS[head](*parts, evaluate=False) if head in ("Add", "Mul") else _HEADS[head](*parts)
        )


def _symbol(name: str, entry: Mapping[str, Any]) -> Any:
    told = {key: True for key in ("positive", "nonnegative") if entry[key]}
    return sympy.Symbol(name, integer=True if entry["integer"] else None, **told)


def _refuse(value: object) -> Any:
    raise ValueError(f"{value!r} is no part of a size expression")
