"""Read the captured call off a graph module as `ExportedProgram.module()` gives it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import InputError
from pt2e_quant.core.export_dims import DimRange
from pt2e_quant.core.index_ranges import index_range
from pt2e_quant.core.input_info import InputInfo, InputKind
from pt2e_quant.core.size_expression import evaluate_size

CAPTURE_KEY = "pt2e_quant"
"""The key of `gm.meta` that holds the Capture."""


def capture_of(gm: GraphModule) -> Capture:
    """The Capture a graph carries, or one rebuilt from its placeholders' fake values."""
    stored = gm.meta.get(CAPTURE_KEY)
    return stored if isinstance(stored, Capture) else rebuild_capture(gm)


def call_graph(gm: GraphModule, capture: Capture, leaves: Sequence[Any]) -> Any:
    """Call a graph: one of this package by position, one of torch.export as it was captured.

    Args:
        gm: the graph.
        capture: its call.
        leaves: of the call, bound.
    """
    if CAPTURE_KEY in gm.meta:
        return gm(*capture.positional(leaves))
    # A hook of torch's tells keywords from positions.
    args, kwargs = pytree.tree_unflatten(list(leaves), capture.in_spec)
    return gm(*args, **kwargs)


def rebuild_capture(gm: GraphModule, mutated_buffers: Sequence[str] = ()) -> Capture:
    """Read a Capture off a graph as `ExportedProgram.module()` gives it.

    Raises:
        InputError: the graph's placeholders carry no fake values.
    """
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    codegen = gm.graph._codegen
    info = getattr(codegen, "pytree_info", None)
    if info is None:
        names = [str(n.target) for n in placeholders]
        in_spec = pytree.tree_structure((tuple(names), {}))
        output = gm.graph.output_node().args[0]
        out_spec = pytree.tree_structure(pytree.tree_map(lambda _: 0, output))
    else:
        names, in_spec, out_spec = list(info.orig_args), info.in_spec, info.out_spec
    paths = _paths(names, in_spec)
    dims: dict[str, DimRange] = {}
    inputs = tuple(_read_input(n, path, dims) for n, path in zip(placeholders, paths, strict=True))
    _leave_out_cut_slices(gm, dims)
    held = dict(gm.named_buffers())
    return Capture(
        arg_names=tuple(names),
        in_spec=in_spec,
        out_spec=out_spec,
        inputs=inputs,
        dims=dims,
        mutated_buffers=tuple(mutated_buffers),
        state_shapes={n: tuple(held[n].shape) for n in mutated_buffers if n in held},
    )


def _leave_out_cut_slices(gm: GraphModule, dims: dict[str, DimRange]) -> None:
    """Raise a least size of 1 to 2 where a slice then has fewer rows than torch gave it.

    torch.export traces every dynamic size as 2 or more, whatever is declared: the two rows of
    `x[:2]` are a fixed size to all operators behind it.
    """
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target is not torch.ops.aten.slice.Tensor:
            continue
        given: Any = (*node.args, *_SLICE_DEFAULTS[len(node.args) :])
        of, dim, start, end, step = given
        values = of.meta.get("val"), node.meta.get("val")
        if not all(isinstance(value, Tensor) for value in values):
            continue
        whole, cut = (value.shape[dim] for value in values)
        if isinstance(whole, int) or not isinstance(cut, int):
            continue
        if not all(end is None or isinstance(end, int) for end in (start, end, step)):
            continue
        expression = whole.node.expr
        named = [str(symbol) for symbol in expression.free_symbols if str(symbol) in dims]
        hints = {name: dims[name].hint for name in named}
        for name in (name for name in named if dims[name].minimum < 2):
            rows = evaluate_size(str(expression), {**hints, name: 1})
            if rows is not None and len(range(*slice(start, end, step).indices(rows))) != cut:
                dims[name] = replace(dims[name], minimum=2)


_SLICE_DEFAULTS = (None, 0, None, None, 1)


def _paths(names: Sequence[str], in_spec: pytree.TreeSpec) -> list[str]:
    tree = pytree.tree_unflatten(list(range(in_spec.num_leaves)), in_spec)
    args, kwargs = tree
    positional = [n for n in names if n not in kwargs]
    named = dict(zip(positional, args, strict=True)) | dict(kwargs)
    found: dict[int, str] = {}
    for name, value in named.items():
        for key, leaf in pytree.tree_flatten_with_path(value)[0]:
            found[leaf] = name + pytree.keystr(key)
    return [found[i] for i in range(in_spec.num_leaves)]


def _read_input(node: Node, path: str, dims: dict[str, DimRange]) -> InputInfo:
    if "val" not in node.meta:
        raise InputError(
            "this graph carries no fake values, so its inputs are unknown",
            node=node,
            fix="give torch.export.export(model, inputs) or its .module(), not a symbolic_trace",
        )
    value = node.meta["val"]
    name = str(node.target)
    if isinstance(value, Tensor):
        return InputInfo(
            name=name,
            path=path,
            kind=InputKind.TENSOR,
            shape=tuple(_read_size(s, dims) for s in value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            device=str(value.device),
            indices=index_range(node),
        )
    if isinstance(value, torch.SymInt):
        return InputInfo(
            name=name, path=path, kind=InputKind.SYMBOL, value=str(_read_size(value, dims))
        )
    return InputInfo(name=name, path=path, kind=InputKind.LITERAL, value=value)


def dims_of(size: int | torch.SymInt) -> dict[str, DimRange]:
    """The ranges of the symbols in a size of a traced value, by name."""
    dims: dict[str, DimRange] = {}
    _read_size(size, dims)
    return dims


def _read_size(size: int | torch.SymInt, dims: dict[str, DimRange]) -> int | str:
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if expression.is_Integer:
        return int(expression)
    ranges = size.node.shape_env.var_to_range
    for symbol in expression.free_symbols:
        if str(symbol) not in dims:
            dims[str(symbol)] = _read_range(symbol, ranges.get(symbol), size)
    return str(expression)


def sampled_sizes(shape_env: Any) -> Any:
    """The sample's size of each symbol that has one; torch 2.11 keeps them under another name."""
    found = getattr(shape_env, "backed_var_to_val", None)
    return shape_env.var_to_val if found is None else found


def _read_range(symbol: Any, limits: Any, size: torch.SymInt) -> DimRange:
    shape_env = size.node.shape_env
    hints = sampled_sizes(shape_env)
    low = int(limits.lower) if limits is not None and limits.lower.is_Integer else 0
    if low == 2:
        # What torch traces every dynamic size with; its programs take a size of 1 as well.
        low = 1
    high = int(limits.upper) if limits is not None and limits.upper.is_Integer else None
    hint = int(hints[symbol]) if symbol in hints else max(low, 2)
    pairs = _equal_sizes(symbol, shape_env)
    if pairs and not any(_passes(pairs, symbol, n) for n in range(1, 8 * hint) if n != hint):
        low = high = hint
    multiple = next(
        (
            divisor
            for divisor in range(1, hint + 1)
            if all(_passes(pairs, symbol, n) for n in range(divisor, 9 * divisor, divisor))
        ),
        1,
    )
    if high is not None and hint - multiple < low and hint + multiple > high:
        low = high = hint
    return DimRange(minimum=low, maximum=high, hint=hint, multiple=multiple)


def _equal_sizes(symbol: Any, shape_env: Any) -> list[tuple[str, str]]:
    """Expressions of a symbol that torch's guards hold equal, both sides as text.

    torch lists that s is even as `Eq(Mod(s, 2), 0)` or `Mod(s, 2) <= 0`.
    """
    found = []
    for guard in shape_env.guards:
        expr = guard.expr
        if not expr.is_Relational or expr.free_symbols != {symbol}:
            continue
        is_rest = type(expr.lhs).__name__ in ("Mod", "PythonMod") and expr.rhs == 0
        if expr.rel_op == "==" or (expr.rel_op == "<=" and is_rest):
            found.append((str(expr.lhs), str(expr.rhs)))
    return found


def _passes(pairs: list[tuple[str, str]], symbol: Any, size: int) -> bool:
    sizes = {str(symbol): size}
    return all(evaluate_size(left, sizes) == evaluate_size(right, sizes) for left, right in pairs)
