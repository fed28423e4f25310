"""Operators under the names that tables, patterns and runtimes know them by."""

from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import aten
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_NAMES = {
    "absolute": "abs",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "fix": "trunc",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "linalg_matmul": "matmul",
    "moveaxis": "movedim",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "row_stack": "vstack",
    "special_erf": "erf",
    "special_erfc": "erfc",
    "special_exp2": "exp2",
    "special_expit": "sigmoid",
    "special_expm1": "expm1",
    "special_log1p": "log1p",
    "special_logit": "logit",
    "special_logsumexp": "logsumexp",
    "special_multigammaln": "mvlgamma",
    "special_sinc": "sinc",
    "special_xlogy": "xlogy",
    "subtract": "sub",
    "true_divide": "div",
}
"""Aliases and the operators that they are (`aten/src/ATen/native/native_functions.yaml`)."""
_JOINS = {"hstack": 1, "vstack": 0, "row_stack": 0, "dstack": 2, "column_stack": 1}
"""The dimension along which each joins tensors that have it."""


def _aliases() -> dict[OpOverload, OpOverload]:
    """Every overload of an alias, in place too, with the one of the same arguments."""
    found = {}
    for alias, name in _NAMES.items():
        for end in ("", "_"):
            if not hasattr(aten, alias + end):
                continue
            packet, plain = (getattr(aten, n + end) for n in (alias, name))
            for form in packet.overloads():
                if form in plain.overloads() and "out" not in form:
                    found[getattr(packet, form)] = getattr(plain, form)
    return found


_OVERLOADS = _aliases()
_JOINING = {getattr(aten, name).default: dim for name, dim in _JOINS.items()}


@graph_pass(needs=(HAS_VALUES,), gives=())
def replace_aliases(gm: GraphModule) -> PassResult:
    """Call operators by one name each, and joins along a fixed dimension as `cat`.

    Before:  clip(multiply(x, y), 0, 6);  hstack([x, y])
    After:   clamp(mul(x, y), 0, 6);      cat([x, y], 1)
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if n.op == "call_function"]:
        target: Any = node.target
        args: tuple[Any, ...] = node.args
        if target in _JOINING and _has_dim(args[0], _JOINING[target]):
            made = aten.cat.default
            args = (*args, _JOINING[target])
        elif target in _OVERLOADS:
            made = _OVERLOADS[target]
        else:
            continue
        kwargs: Any = node.kwargs
        value = node.meta["val"]
        editor.replace(node, editor.call(made, *args, like=node, val=value, **kwargs))
        notes.append(Note(node.name, f"{target} is {made}"))
    return PassResult(editor.finish(), tuple(notes))


def _has_dim(tensors: list[Node], dim: int) -> bool:
    """True for tensors that a join need not give more dimensions."""
    values = [n.meta["val"] for n in tensors]
    return all(isinstance(v, Tensor) and v.dim() > max(dim, 1) for v in values)
