"""Sizes as text: evaluates symbolic size expressions such as `2*s0 + 1` without running code."""

import ast
import operator
from collections.abc import Callable, Mapping

_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_LARGEST_POWER = 16
"""Shapes have fewer axes; a file's expression must not count for ever."""

_CALLS: dict[str, Callable[[int, int], int]] = {
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": max,
    "Min": min,
}

_PROBES = 65
"""Sizes that a form is held against: torch divides by small numbers."""


def evaluate_size(expression: str, sizes: Mapping[str, int]) -> int | None:
    """The value of a size expression; None if it cannot be told.

    Files carry these expressions, so they are parsed, never run.

    >>> evaluate_size("2*s0 + FloorDiv(s1, 4)", {"s0": 3, "s1": 9})
    8
    >>> evaluate_size("s0**2 - 1", {"s0": 3})
    8
    >>> evaluate_size("2*s0", {}) is None
    True
    """
    try:
        return _walk(ast.parse(expression, mode="eval").body, sizes)
    except (SyntaxError, LookupError, ZeroDivisionError):
        return None


def linear_form(expression: str) -> tuple[str, int, int] | None:
    """The symbol, factor and summand of `factor * symbol + summand`; None for other expressions.

    >>> linear_form("2*s0 + 1"), linear_form("FloorDiv(s0, 2)"), linear_form("s0 + s1")
    (('s0', 2, 1), None, None)
    """
    names = {n.id for n in ast.walk(ast.parse(expression)) if isinstance(n, ast.Name)}
    symbols = names - _CALLS.keys()
    if len(symbols) != 1:
        return None
    (symbol,) = symbols
    values = [evaluate_size(expression, {symbol: size}) for size in range(_PROBES)]
    first, second = values[:2]
    if first is None or second is None or second <= first:
        return None
    factor = second - first
    is_linear = all(value == factor * size + first for size, value in enumerate(values))
    return (symbol, factor, first) if is_linear else None


def _walk(node: ast.expr, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return sizes[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_walk(operand, sizes)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))) if (
            0 <= power <= _LARGEST_POWER
        ):
            return int(_walk(left, sizes) ** power)
        case ast.BinOp(left=left, op=op, right=right):
            return _BINARY[type(op)](_walk(left, sizes), _walk(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=[first, second], keywords=[]):
            return _CALLS[name](_walk(first, sizes), _walk(second, sizes))
    raise LookupError(ast.dump(node))
