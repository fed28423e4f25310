"""Activation functions that a model writes out, as the operators that they are.

Models write swish, hardswish and GELU by hand, in code older than the operators or as papers have
them. Tables, algorithms and runtimes know the operators. Written out, networks with a hardswish
took 2.1 to 3.1 times as long, and one with the error function of a GELU 10.7 times on XNNPACK
(`benchmarks/written_activations.py`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import ADD, DIV, MUL, RELU6, argument, aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_DEEPEST = 3
"""Products inside of a product that are looked at, so that a walk stays linear."""
_NEAR = 1e-3
"""How far a constant may be from the formula's: some write sqrt(2 / pi) as 0.7978."""
_OPERANDS = (Node, int, float)
"""A complex number is none."""
_GATES = {
    aten.sigmoid.default: aten.silu.default,
    aten.hardsigmoid.default: aten.hardswish.default,
}


@dataclass(frozen=True, slots=True)
class _Product:
    """A number times values; a power is as many times the same one."""

    number: float
    factors: tuple[Node, ...]


@graph_pass(needs=(HAS_VALUES,), gives=())
def name_activations(gm: GraphModule) -> PassResult:
    """Call silu, hardsigmoid, hardswish, gelu and mish where a model writes them out.

    Before:  x * sigmoid(x);  x * relu6(x + 3) / 6;  0.5 * x * (1 + erf(x / sqrt(2)))
    After:   silu(x);         hardswish(x);          gelu(x)
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, MUL + DIV)]:
        found = _activation(editor.now, node)
        if found is None:
            continue
        x, target, options = found
        value, source = node.meta["val"], x.meta["val"]
        if source.dtype != value.dtype or str(source.shape) != str(value.shape):
            continue
        made = editor.call(target, x, like=node, val=value, **options)
        editor.replace(node, made)
        notes.append(Note(node.name, f"is written out: {target}"))
    return PassResult(editor.finish(), tuple(notes))


def _activation(
    now: Callable[[Node], Node], node: Node
) -> tuple[Node, OpOverload, dict[str, Any]] | None:
    """What a product computes: the input of an activation, its operator and its options."""
    product = _product(now, node)
    if len(product.factors) == 1:
        (gate,) = product.factors
        x = _three_more(now, gate)
        is_sixth = x is not None and _is(product.number, 1 / 6)
        return (x, aten.hardsigmoid.default, {}) if x is not None and is_sixth else None
    if len(product.factors) != 2:
        return None
    for x, gate in (product.factors, product.factors[::-1]):
        made = _gated(now, product.number, x, gate)
        if made is not None:
            return x, *made
    return None


def _gated(
    now: Callable[[Node], Node], number: float, x: Node, gate: Node
) -> tuple[OpOverload, dict[str, Any]] | None:
    """The activation that a number times an input times a gate is."""
    target: Any = gate.target
    if _is(number, 1 / 6) and _three_more(now, gate) is x:
        return aten.hardswish.default, {}
    if _is(number, 1):
        if target in _GATES and _read(now, gate) is x:
            return _GATES[target], {}
        softplus = _read(now, gate) if target is aten.tanh.default else None
        if softplus is not None and softplus.target is aten.softplus.default:
            is_plain = len(softplus.args) == 1 and not softplus.kwargs
            return (aten.mish.default, {}) if is_plain and _read(now, softplus) is x else None
    inner = _one_more(now, gate) if _is(number, 0.5) else None
    read = _read(now, inner) if inner is not None else None
    if inner is None or read is None:
        return None
    if inner.target is aten.erf.default:
        scaled = _product(now, read)
        is_gelu = scaled.factors == (x,) and _is(scaled.number, math.sqrt(0.5))
        return (aten.gelu.default, {}) if is_gelu else None
    is_gelu = inner.target is aten.tanh.default and _is_cubic(now, read, x)
    return (aten.gelu.default, {"approximate": "tanh"}) if is_gelu else None


def _is_cubic(now: Callable[[Node], Node], node: Node, x: Node) -> bool:
    """True for sqrt(2 / pi) (x + 0.044715 x³), or with x taken out of the sum."""
    outer = _product(now, node)
    if not _is(outer.number, math.sqrt(2 / math.pi)):
        return False
    if len(outer.factors) == 1:
        terms = _terms(now, outer.factors[0])
        products = [_product(now, t) for t in terms if isinstance(t, Node)]
        return _are(products, [(1.0, (x,)), (0.044715, (x,) * 3)])
    rest = [factor for factor in outer.factors if factor is not x]
    gate = _one_more(now, rest[0]) if len(rest) == 1 and len(outer.factors) == 2 else None
    return gate is not None and _are([_product(now, gate)], [(0.044715, (x,) * 2)])


def _are(found: list[_Product], wanted: list[tuple[float, tuple[Node, ...]]]) -> bool:
    pairs = zip(sorted(found, key=lambda p: len(p.factors)), wanted, strict=False)
    return len(found) == len(wanted) and all(
        p.factors == factors and _is(p.number, number) for p, (number, factors) in pairs
    )


def _product(now: Callable[[Node], Node], node: Node, depth: int = 0) -> _Product:
    """The factors of a value, in the order of its call; of what is no product, itself."""
    number = 1.0
    factors: list[Node] = []
    for factor in _factors(now, node):
        if not isinstance(factor, Node):
            number *= factor
        elif factor is not node and depth < _DEEPEST and _is_product(factor):
            inner = _product(now, factor, depth + 1)
            number *= inner.number
            factors += inner.factors
        else:
            factors.append(factor)
    return _Product(number, tuple(factors))


def _is_product(node: Node) -> bool:
    return is_call(node, (*MUL, *DIV, aten.pow.Tensor_Scalar, aten.square.default))


def _factors(now: Callable[[Node], Node], node: Node) -> Iterator[Node | float]:
    args: tuple[Any, ...] = node.args
    if is_call(node, MUL) and all(isinstance(a, _OPERANDS) for a in args[:2]):
        yield from (now(a) if isinstance(a, Node) else float(a) for a in args[:2])
    elif is_call(node, DIV) and isinstance(args[1], (int, float)) and args[1]:
        yield now(args[0])
        yield 1.0 / args[1]
    elif node.target is aten.pow.Tensor_Scalar and args[1] in (2, 3):
        yield from [now(args[0])] * int(args[1])
    elif node.target is aten.square.default:
        yield from [now(args[0])] * 2
    else:
        yield node


def _terms(now: Callable[[Node], Node], node: Node) -> list[Node | float]:
    """The two terms of a sum; none of what is no plain sum."""
    is_plain = is_call(node, ADD) and argument(node, "alpha") == 1
    if not is_plain or not all(isinstance(a, _OPERANDS) for a in node.args[:2]):
        return []
    return [now(a) if isinstance(a, Node) else float(a) for a in node.args[:2]]  # type: ignore[arg-type]


def _plus(now: Callable[[Node], Node], node: Node, number: float) -> Node | None:
    """What a number is added to."""
    terms = _terms(now, node)
    values = [t for t in terms if isinstance(t, Node)]
    return values[0] if len(values) == 1 and number in terms else None


def _one_more(now: Callable[[Node], Node], node: Node) -> Node | None:
    return _plus(now, node, 1.0)


def _three_more(now: Callable[[Node], Node], node: Node) -> Node | None:
    """X of a relu6(x + 3), whatever operator clips it."""
    read = _read(now, node) if is_call(node, RELU6) else None
    return _plus(now, read, 3.0) if read is not None else None


def _read(now: Callable[[Node], Node], node: Node) -> Node | None:
    """The first argument of a call."""
    source = node.args[0] if node.args else None
    return now(source) if isinstance(source, Node) else None


def _is(number: float, wanted: float) -> bool:
    return math.isclose(number, wanted, rel_tol=_NEAR)
