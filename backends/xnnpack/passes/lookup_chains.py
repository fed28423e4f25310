"""Chains of functions of 8-bit integers that XNNPACK must not fuse into one table.

XNNPACK (in ExecuTorch 1.4) computes successive functions of one value of 8 bits by one table of
256 entries; a sum or product with a constant counts as such a function, and so does one of two
values of the chain, as in `x * sigmoid(x)`. Its memory is corrupted where a table that it has
made meets another function: the runtime then frees a table twice, when the program is loaded or
let go of (google/XNNPACK pull requests 9935 and 10756, issues.chromium.org/497456778). Chains of
more than ten nodes corrupt it too. A requantization between two scales is two nodes of a chain.
"""

from dataclasses import dataclass, replace
from typing import Any

from executorch.exir.dialects._ops import ops as exir_ops
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult as EdgeResult

from pt2e_quant.backends.xnnpack.passes.edge_forms import view_in_own_shape

_EDGE = exir_ops.edge.aten
_QDQ = exir_ops.edge.quantized_decomposed
_QUANTIZE: Any = _QDQ.quantize_per_tensor.default
_DEQUANTIZE: Any = _QDQ.dequantize_per_tensor.default
_UNARY = frozenset(
    {
        _EDGE.abs.default,
        _EDGE.ceil.default,
        _EDGE.clamp.default,
        _EDGE.cos.default,
        _EDGE.elu.default,
        _EDGE.exp.default,
        _EDGE.floor.default,
        _EDGE.gelu.default,
        _EDGE.hardswish.default,
        _EDGE.hardtanh.default,
        _EDGE.leaky_relu.default,
        _EDGE.log.default,
        _EDGE.neg.default,
        _EDGE.pow.Tensor_Scalar,
        _EDGE.relu.default,
        _EDGE.rsqrt.default,
        _EDGE.sigmoid.default,
        _EDGE.sin.default,
        _EDGE.sqrt.default,
        _EDGE.tanh.default,
    }
)
_BINARY = frozenset(
    {
        _EDGE.add.Tensor,
        _EDGE.div.Tensor,
        _EDGE.maximum.default,
        _EDGE.minimum.default,
        _EDGE.mul.Tensor,
        _EDGE.sub.Tensor,
    }
)
_SAME_VALUES = frozenset(
    {
        _QUANTIZE,
        _DEQUANTIZE,
        _EDGE.permute_copy.default,
        _EDGE.squeeze_copy.dim,
        _EDGE.squeeze_copy.dims,
        _EDGE.t_copy.default,
        _EDGE.unsqueeze_copy.default,
        _EDGE.view_copy.default,
    }
)
"""Views that may stand in a chain: XNNPACK moves them behind functions."""

_FUSED = 4
"""The most functions in one table: each is up to two nodes, and ten are XNNPACK's limit."""

_REQUANTIZATION = 2
"""The nodes of a requantization: a conversion to float and one to integers."""


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of a value in a chain of functions.

    Attributes:
        root: the value of 8 bits that begins it.
        depth: functions since then, a requantization counted as two.
        in_float: whether one of them reads what another gives without q/dq between the two.
    """

    root: Node
    depth: int
    in_float: bool = False


def separate_functions(gm: GraphModule) -> EdgeResult:
    """Put views of their own shape between the functions of chains that XNNPACK fuses wrongly.

    Such are chains with a constant operand behind two functions, those with functions in float
    side by side, and long ones.

    Before:  mul(dq(q(tanh(dq(q(sqrt(x)))))), constant)
    After:   mul(dq(q(tanh(dq(q(view(dq(q(sqrt(x))))))))), constant), and the same before the mul
    """
    places: dict[Node, _Place] = {}
    unsafe = set()
    for node in gm.graph.nodes:
        place = _place_of(node, places)
        if place is None:
            continue
        places[node] = place
        if node.target in _BINARY and place.depth > 2 and _is_with_constant(node):
            unsafe.add(place.root)
        elif place.depth > _FUSED or place.in_float:
            unsafe.add(place.root)
    for node, place in places.items():
        if place.root in unsafe and place.depth > 1 and node.target not in _SAME_VALUES:
            for source in node.all_input_nodes:
                if source in places and places[source].depth:
                    node.replace_input_with(source, _apart(gm, source))
    if unsafe:
        gm.recompile()
    return EdgeResult(gm, bool(unsafe))


def _place_of(node: Node, places: dict[Node, _Place]) -> _Place | None:
    """Return the place of a node's value in a chain, None if a table cannot give it."""
    if node.target is _DEQUANTIZE and not _is_constant(node):
        return places.get(node.args[0]) or _Place(node.args[0], 0)  # type: ignore[arg-type]  # a node
    if node.target in _SAME_VALUES:
        place = places.get(node.args[0])  # type: ignore[arg-type]  # a node
        if place is not None and _is_requantization(node):
            return replace(place, depth=place.depth + _REQUANTIZATION)
        return place
    if node.target not in _UNARY | _BINARY:
        return None
    operands = [places.get(n) for n in node.all_input_nodes if not _is_constant(n)]
    found = [p for p in operands if p is not None]
    if not found or len(found) < len(operands) or len({p.root for p in found}) > 1:
        return None
    in_float = any(
        places[n].depth and n.target is not _DEQUANTIZE for n in node.all_input_nodes if n in places
    )
    in_float = in_float or any(p.in_float for p in found)
    return _Place(found[0].root, 1 + max(p.depth for p in found), in_float)


def _is_requantization(node: Node) -> bool:
    """True if a quantize reads a dequantize: XNNPACK converts to float and back."""
    source = node.args[0]
    return node.target is _QUANTIZE and isinstance(source, Node) and source.target is _DEQUANTIZE


def _is_with_constant(node: Node) -> bool:
    operands: tuple[Any, ...] = node.args[:2]
    return any(not isinstance(n, Node) or _is_constant(n) for n in operands)


def _is_constant(node: Node) -> bool:
    """True if a value is a constant of the program, stored in integers or in float.

    Inputs of the program look the same here, which does no harm.
    """
    while node.target is _DEQUANTIZE:
        node = node.args[0]  # type: ignore[assignment]  # a node
    return node.op in ("placeholder", "get_attr")


def _apart(gm: GraphModule, source: Node) -> Node:
    """A view of a value, in integers where the value is."""
    view = view_in_own_shape(gm, source)
    if source.target != _DEQUANTIZE:
        return view
    qparams = source.args[1:]
    with gm.graph.inserting_after(view):
        stored = gm.graph.call_function(_QUANTIZE, (view, *qparams))
    with gm.graph.inserting_after(stored):
        back = gm.graph.call_function(_DEQUANTIZE, (stored, *qparams))
    integers: Any = source.args[0]
    stored.meta = {**source.meta, "val": source.meta["val"].to(integers.meta["val"].dtype)}
    back.meta = dict(source.meta)
    return back
