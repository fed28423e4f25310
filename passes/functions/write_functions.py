"""Write functions that a runtime lacks with operators that it has."""

from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of, without_guards
from pt2e_quant.graph.ops import is_getitem
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult
from pt2e_quant.graph.subgraphs import named_graphs
from pt2e_quant.passes.functions import rows, sizes_of_run_time
from pt2e_quant.passes.functions.table import FUNCTIONS, LEAVES, OF_IMAGES


def write_functions(
    has: Collection[str],
    is_inexact: Callable[[Node], bool] = lambda node: False,
    *,
    takes_sizes: bool = True,
) -> GraphPass:
    """A pass over a canonical graph and its bodies.

    Before:  hypot(x, y)
    After:   mul(maximum(abs(x), abs(y)), sqrt(…))

    Args:
        has: the functions that the runtime has itself.
        is_inexact: calls that are written although the runtime has the function.
        takes_sizes: whether operators take a dynamic size for a number; other calls that are given
            one get it as a tensor.
    """
    wanted = FUNCTIONS.keys() - set(has)

    def function_of(node: Node) -> Callable[..., rows.Results] | None:
        name, places = (
            str(node.target),
            () if takes_sizes else sizes_of_run_time.sizes_for_numbers(node),
        )
        if name in wanted or (name in FUNCTIONS and (places or is_inexact(node))):
            return FUNCTIONS[name]
        return sizes_of_run_time.with_tensors(node, places) if places else None

    def edit(gm: GraphModule) -> PassResult:
        notes: list[Note] = []
        for body in named_graphs(gm):
            calls = [(n, found) for n in body.gm.graph.nodes if (found := function_of(n))]
            written = [
                n
                for n, function in calls
                if write_out(body.gm, n, function, is_canonical=str(n.target) in OF_IMAGES)
            ]
            notes += [Note(node.name, f"{node.target} is written out") for node in written]
            if written:
                body.gm.graph.eliminate_dead_code()
                recompile(body.gm)
        return PassResult(bool(notes), tuple(notes))

    return GraphPass("write_functions", edit, needs=(HAS_VALUES,), gives=())


def write_out(
    gm: GraphModule,
    node: Node,
    function: Callable[..., rows.Results],
    operator: Callable[[Any], Any] = lambda target: target,
    *,
    is_canonical: bool = False,
) -> bool:
    """Put what a function traces to in a node's place.

    Args:
        gm: the node's graph module. Its dead code is to be eliminated and it is to be recompiled,
            once for all calls.
        node: a call.
        function: what it is called as instead.
        operator: what to call in place of an ATen overload.
        is_canonical: trace to the operators of exported programs, and fold those of constants;
            to what these are decomposed into otherwise.

    Returns:
        False where the function cannot be written, for example of a dynamic size.
    """
    inputs = list(dict.fromkeys(node.all_input_nodes))

    def call(*values: Tensor) -> rows.Results:
        held = dict(zip(inputs, values, strict=True))
        args: Any = map_arg(node.args, lambda n: held[n])
        kwargs: Any = map_arg(node.kwargs, lambda n: held[n])
        return function(*args, **kwargs)

    results = trace_before(
        gm,
        node,
        call,
        inputs,
        operator,
        is_canonical=is_canonical,
        fits=lambda results: _gives_all(node, results),
    )
    if results is None:
        return False
    _replace(node, results)
    # Dead code that draws random numbers is not eliminated.
    for user in [*node.users, node]:
        node.graph.erase_node(user)
    return True


@cache
def _decompositions() -> dict[Any, Any]:
    """Of torch's own operators, which is all that functions call: torch takes 0.1 s to make it."""
    return {**torch.export.default_decompositions(), **LEAVES}


def trace_before(
    gm: GraphModule,
    node: Node,
    call: Callable[..., Any],
    inputs: Sequence[Node],
    operator: Callable[[Any], Any] = lambda target: target,
    *,
    is_canonical: bool,
    fits: Callable[[Any], bool] = lambda results: True,
) -> Any:
    """Insert in front of a node what a function traces to; its inputs and results are flat.

    Args:
        gm: the node's graph module, to be recompiled.
        node: what is inserted takes its place in the source.
        call: the function.
        inputs: what it is called with.
        operator: what to call in place of an ATen overload.
        is_canonical: trace to the operators of exported programs, and fold those of constants;
            to what these are decomposed into otherwise.
        fits: whether results will do, in the form of `call`'s, with nodes for tensors.

    Returns:
        The results; None where the function cannot be written, or they do not fit.
    """
    table = {} if is_canonical else _decompositions()
    values = [n.meta["val"] for n in inputs]
    try:
        of_any = (*values, node.meta.get("val"))  # a tensor that is made anew reads none
        mode = next(v.fake_mode for v in of_any if isinstance(v, FakeTensor))
        # A convolution asks for 16 images or more: 2 volumes of a depth of at most 8 would be held
        # to a depth of 8.
        with mode, without_guards(mode):
            # Two nodes may hold one value in their metadata: traced, it would be one input.
            own = [v.detach() if isinstance(v, FakeTensor) else v for v in values]
            traced = make_fx(call, dict(table), pre_dispatch=is_canonical, tracing_mode="symbolic")(
                *own
            )
    except NotImplementedError:
        return None
    if not fits(traced.graph.output_node().args[0]):
        return None
    made: dict[Node, Any] = {}
    given = iter(inputs)
    known: dict[Node, Any] = {}

    def stored(inner: Node) -> Node:
        if inner not in made:  # known, and read by a call that is not
            value = known[inner].contiguous()
            made[inner] = Editor(gm).constant(f"{inner.name}_value", value, like=node)
        found: Node = made[inner]
        return found

    for inner in traced.graph.nodes:
        if inner.op == "placeholder":
            made[inner] = next(given)
        elif inner.op == "call_function" and "val" in inner.meta:  # checks have none
            if is_canonical and _is_known(inner, known):
                args, kwargs = map_arg((inner.args, inner.kwargs), known.__getitem__)
                known[inner] = inner.target(*args, **kwargs)
                continue
            args, kwargs = map_arg((inner.args, inner.kwargs), stored)
            with gm.graph.inserting_before(node):
                made[inner] = gm.graph.call_function(operator(inner.target), args, kwargs)
            made[inner].meta = {**node.meta, "val": inner.meta["val"]}
            if is_canonical:
                made[inner] = _folded(gm, made[inner])
    return map_arg(traced.graph.output_node().args[0], stored)


def _is_known(inner: Node, known: Collection[Node]) -> bool:
    """True for a call of nothing but numbers and tensors that are known, which gives a tensor."""
    gives_tensor = isinstance(inner.target, OpOverload) and isinstance(inner.meta["val"], Tensor)
    return gives_tensor and all(n in known for n in inner.all_input_nodes)


def _folded(gm: GraphModule, node: Node) -> Node:
    """The constant that a node gives; the node itself if it is none."""
    value = constant_of(gm, node)
    if value is None:
        return node
    name = f"{node.all_input_nodes[0].target}_{node.name}"
    return Editor(gm).constant(name, value.contiguous(), like=node)


def _gives_all(node: Node, results: Any) -> bool:
    """True if a function gives every result of a node that is read, in its dtype."""
    if isinstance(results, Node):
        return bool(results.meta["val"].dtype == node.meta["val"].dtype)
    read = [u for u in node.users if is_getitem(u) and u.users]
    return all(u.args[1] < len(results) for u in read)  # type: ignore[operator]  # integers


def _replace(node: Node, results: Any) -> None:
    if isinstance(results, Node):
        node.replace_all_uses_with(results)
        return
    for user in [u for u in node.users if is_getitem(u) and u.users]:
        user.replace_all_uses_with(results[user.args[1]])
