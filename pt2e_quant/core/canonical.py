"""The canonical q/dq graph: the one contract between front and back, and its verifier."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node

from pt2e_quant.core.affine_ops import is_affine_quantize
from pt2e_quant.core.cache_ops import is_pack_rows
from pt2e_quant.core.dtypes import FLOAT8
from pt2e_quant.core.errors import InvariantError
from pt2e_quant.core.integer_ops.quantize import WRITTEN_KINDS
from pt2e_quant.core.provenance import PROVENANCE_KEY
from pt2e_quant.core.qdq import (
    FLOAT_NAME_KEY,
    DequantizePerTensorDynamic,
    is_dequantize,
    is_qdq,
    is_quantize,
    kind_of_qdq,
    required_attribute,
)
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.core.unpack_op import is_unpack


class Form(StrEnum):
    """The forms a converted graph may have."""

    CANONICAL = "canonical"
    UNFOLDED = "unfolded"
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class _Row:
    """One property: `offenders` yields the nodes that break it, in graph order."""

    forms: frozenset[Form]
    what: str
    offenders: Callable[[GraphModule], Iterator[Node]]


def verify_canonical(gm: GraphModule, form: Form = Form.CANONICAL) -> None:
    """Check that a graph is a converted one.

    Raises:
        InvariantError: naming the property and the first node that breaks it.
    """
    for rule in _RULES:
        if form not in rule.forms:
            continue
        for node in rule.offenders(gm):
            raise InvariantError(
                f"this graph is not in {form} form: {rule.what}",
                node=node,
                fix="give the result of convert_pt2e, before any other edit"
                if PROVENANCE_KEY in gm.meta
                else "prepare and convert with pq.prepare_pt2e and pq.convert_pt2e, which take "
                "the same quantizers: torchao's own convert_pt2e makes graphs of another form",
            )


def _calls(gm: GraphModule) -> Iterator[Node]:
    return (n for n in gm.graph.nodes if n.op == "call_function")


def _modules(gm: GraphModule) -> Iterator[Node]:
    return (n for n in gm.graph.nodes if n.op in ("call_module", "call_method"))


def _dead_constants(gm: GraphModule) -> Iterator[Node]:
    return (n for n in gm.graph.nodes if n.op == "get_attr" and not n.users)


def _unread_quantize(gm: GraphModule) -> Iterator[Node]:
    return (n for n in _calls(gm) if is_quantize(n) and not n.users)


def _quantize_read_as_float(gm: GraphModule) -> Iterator[Node]:
    for node in _calls(gm):
        if not is_quantize(node):
            continue
        if any(user.op == "call_function" and not _takes_integers(user) for user in node.users):
            yield node


def _takes_integers(user: Node) -> bool:
    """A dequantize, or what puts integers into a buffer (a quantized cache)."""
    if is_dequantize(user) or is_pack_rows(user):
        return True
    schema = getattr(user.target, "_schema", None)
    return bool(getattr(schema, "is_mutable", False))


def _dequantize_of_float(gm: GraphModule) -> Iterator[Node]:
    for node in _calls(gm):
        if is_dequantize(node):
            source = node.args[0]
            value = source.meta.get("val") if isinstance(source, Node) else None
            if not isinstance(value, Tensor) or not _holds_codes(value.dtype):
                yield node


def _holds_codes(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point or dtype in FLOAT8


def _quantized_constant(gm: GraphModule) -> Iterator[Node]:
    for node in _calls(gm):
        is_folding = is_quantize(node) or is_affine_quantize(node)
        source = node.args[0] if is_folding else None
        if isinstance(source, Node) and source.op == "get_attr":
            yield node


def _shared_dequantize(gm: GraphModule) -> Iterator[Node]:
    for node in _calls(gm):
        if node.target is DequantizePerTensorDynamic:
            continue  # the form of torchao's PT2E, which lowerings take too
        if is_dequantize(node) and len(node.users) > 1:
            if any(Q_ANNOTATION_KEY in user.meta for user in node.users):
                yield node


def _misplaced_unpack(gm: GraphModule) -> Iterator[Node]:
    """Unpacks that do not stand between a constant and dequantizes (or the call of a body)."""
    for node in _calls(gm):
        if not is_unpack(node):
            continue
        packed = node.args[0]
        is_constant = isinstance(packed, Node) and packed.op == "get_attr"
        is_read = bool(node.users) and all(
            is_dequantize(user) or isinstance(user.target, HigherOrderOperator)
            for user in node.users
        )
        if not is_constant or not is_read:
            yield node


def _float_twins(gm: GraphModule) -> Iterator[Node]:
    """Integer constants whose float original is still in the module and read by no one."""
    read = {str(n.target) for n in gm.graph.nodes if n.op == "get_attr"}
    for node in gm.graph.nodes:
        name = node.meta.get(FLOAT_NAME_KEY)
        if node.op != "get_attr" or name is None or name in read:
            continue
        try:
            required_attribute(gm, name)
        except AttributeError:
            continue
        yield node


def _valueless(gm: GraphModule) -> Iterator[Node]:
    return (n for n in _calls(gm) if is_qdq(n) and "val" not in n.meta)


def _unwritten(gm: GraphModule) -> Iterator[Node]:
    return (n for n in _calls(gm) if kind_of_qdq(n) in WRITTEN_KINDS)


_ALL = frozenset(Form)
_BOTH = frozenset({Form.CANONICAL, Form.UNFOLDED})
_FOLDED = frozenset({Form.CANONICAL})
_INTEGERS = frozenset({Form.REFERENCE})

_RULES = (
    _Row(_ALL, "a module or method call is left (an observer?)", _modules),
    _Row(_ALL, "a constant that nothing reads is left", _dead_constants),
    _Row(_BOTH, "a quantize that nothing reads is left", _unread_quantize),
    _Row(
        _BOTH,
        "the integers of a quantize are read by something else than a dequantize",
        _quantize_read_as_float,
    ),
    _Row(_BOTH, "a dequantize reads something that is no integer tensor", _dequantize_of_float),
    _Row(_BOTH, "an unpack stands elsewhere than from constant to dequantize", _misplaced_unpack),
    _Row(_FOLDED, "a constant is stored in float with a quantize behind it", _quantized_constant),
    _Row(_FOLDED, "a quantized weight is still there in float", _float_twins),
    _Row(_BOTH, "an annotated node shares its dequantize with others", _shared_dequantize),
    _Row(_INTEGERS, "a q/dq that integer arithmetic can say is left", _unwritten),
    _Row(_BOTH, "a q/dq node carries no fake value", _valueless),
)
