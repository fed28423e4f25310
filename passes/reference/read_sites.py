"""Read the operators of a q/dq graph that stand between integers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.integer_ops.calls import Call
from pt2e_quant.core.integer_ops.requantize import output_range
from pt2e_quant.core.qdq import (
    STATIC_KINDS,
    DequantizePerTensorDynamic,
    QdqKind,
    is_dequantize,
    is_quantize,
    kind_of_qdq,
    read_qparams,
)
from pt2e_quant.core.qparams import QParams, dequantize
from pt2e_quant.graph.clamps import clamp_bounds
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_nodes, constant_of
from pt2e_quant.graph.ops import (
    ADD,
    CASTS,
    MUL,
    SOFTMAX,
    SUB,
    arguments,
    is_call,
)
from pt2e_quant.passes.reference.forms.moves import BOOLEANS, CLAMPS, INTEGERS, ZEROS
from pt2e_quant.passes.reference.forms.registry import REQUANTIZE, form_of
from pt2e_quant.passes.reference.forms.site import Arithmetic, IntegerForm, Operand, Output, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSite:
    """A float operator that has an integer form.

    Attributes:
        form: of the operator.
        op: the operator; a dequantize where a quantize follows it directly.
        activation: a clamp between the operator and the quantize.
        quantize: what ends it; None if the result stays float.
    """

    form: IntegerForm
    op: Node
    activation: Node | None = None
    quantize: Node | None = None

    @property
    def anchor(self) -> Node:
        """The node that the integers replace."""
        return self.quantize or self.op

    @property
    def names(self) -> set[str]:
        """Those of the operator and of its clamp."""
        return {node.name for node in (self.op, self.activation) if node is not None}

    @property
    def covered(self) -> list[Node]:
        """The nodes that may be left without a reader."""
        nodes = [n for n in (self.activation, self.op) if n is not None]
        masked, gated = masked_scores(self.op), gated_values(self.op)
        if masked is not None:
            nodes.append(masked.sum)
        found = [*nodes, *(i for n in nodes for i in n.all_input_nodes if is_dequantize(i))]
        found += [] if gated is None else [gated.cast]
        return found if masked is None else [*found, *_additive(masked.mask)]

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """Real bounds that a clamp sets to the result."""
        is_clamp = self.activation is None and is_call(self.op, CLAMPS)
        clamp = self.op if is_clamp else self.activation
        if clamp is None:
            return None, None
        bounds = clamp_bounds(clamp)
        assert bounds is not None  # activations that are fused are clamps of numbers
        return bounds


@dataclass(frozen=True, slots=True)
class MaskedScores:
    """The inputs of a softmax.

    Attributes:
        sum: of the other two.
        scores: the dequantize.
        mask: what is added to them in float.
    """

    sum: Node
    scores: Node
    mask: Node


def masked_scores(node: Node) -> MaskedScores | None:
    """The sum of integers and a float mask that a softmax reads, None if it reads another."""
    total = node.all_input_nodes[0] if is_call(node, SOFTMAX) else None
    if total is None or not is_call(total, ADD) or arguments(total)["alpha"] != 1:
        return None
    first, second = (arguments(total)[name] for name in ("self", "other"))
    for scores, mask in ((first, second), (second, first)):
        if isinstance(scores, Node) and isinstance(mask, Node) and is_dequantize(scores):
            return None if is_dequantize(mask) else MaskedScores(total, scores, mask)
    return None


@dataclass(frozen=True, slots=True)
class GatedValues:
    """The inputs of a product with booleans.

    Attributes:
        values: the dequantize.
        cast: of the booleans to float.
        gate: the booleans.
    """

    values: Node
    cast: Node
    gate: Node


def gated_values(node: Node) -> GatedValues | None:
    """The integers and the booleans that a product reads, None if it reads something else."""
    if not is_call(node, MUL):
        return None
    first, second = (arguments(node)[name] for name in ("self", "other"))
    for values, gate in ((first, second), (second, first)):
        if not isinstance(values, Node) or not isinstance(gate, Node) or not is_dequantize(values):
            continue
        source = cast_booleans(gate)
        if source is not None:
            return GatedValues(values, gate, source)
    return None


def cast_booleans(node: Node) -> Node | None:
    """The booleans that a node is a cast of, None if it is no such cast."""
    source = node.args[0] if is_call(node, CASTS) else None
    is_bool = isinstance(source, Node) and source.meta["val"].dtype is torch.bool
    return source if is_bool else None  # type: ignore[return-value]  # a node, see above


def cast_integers(node: Node) -> Node | None:
    """The integers that a node is a cast to float of, None if it is no such cast."""
    source = node.args[0] if is_call(node, CASTS) else None
    if not isinstance(source, Node) or not node.meta["val"].is_floating_point():
        return None
    given = source.meta["val"].dtype
    is_whole = not given.is_floating_point and not given.is_complex and given is not torch.bool
    return source if is_whole else None


def arguments_of(op: Node) -> dict[str, Any]:
    """The arguments of an operator as its form takes them.

    A softmax reads the scores in front of the sum with a mask, and the mask by itself: the booleans
    that it is made of, if it is. A product with booleans reads these.
    """
    given = arguments(op)
    masked, gated = masked_scores(op), gated_values(op)
    if masked is not None:
        made = _additive(masked.mask)
        mask = made[-1].args[0] if made else masked.mask
        given |= {"self": masked.scores, "mask": mask}
    if gated is not None:
        given |= {"self": gated.values, "other": gated.gate}
    return given


def _additive(mask: Node) -> list[Node]:
    """The nodes of (seen - 1) * big, the last one first; none if it is no such mask."""
    chain, operators = [mask], (MUL, SUB, CASTS)
    for overloads in operators[1:]:
        source = chain[-1].args[0] if chain[-1].args else None
        if not isinstance(source, Node) or not is_call(source, overloads):
            return []
        chain.append(source)
    product, difference, cast = chain
    big, seen = product.args[1], cast.args[0]
    if not is_call(product, MUL) or not isinstance(big, (int, float)) or big < _BIG:
        return []
    is_bool = isinstance(seen, Node) and seen.meta["val"].dtype is torch.bool
    return chain if is_bool and difference.args[1] == 1.0 else []


_BIG = 1e9
"""From here a masked score is below every other."""


def find_sites(gm: GraphModule) -> list[FoundSite]:
    """The operators with a form that read integers, in graph order."""
    found = (_found(node) for node in gm.graph.nodes)
    return [site for site in found if site is not None]


def _found(node: Node) -> FoundSite | None:
    if is_quantize(node):
        return _ending_in(node) if kind_of_qdq(node) is QdqKind.PER_TENSOR else None
    form = form_of(node)
    if form is None or not form.is_for_float or not reads_integers(node):
        return None
    is_read_as_float = not all(_is_quantized_by(user) for user in node.users)
    return FoundSite(form=form, op=node) if is_read_as_float else None


def _ending_in(quantize: Node) -> FoundSite | None:
    op = quantize.args[0]
    assert isinstance(op, Node)
    if kind_of_qdq(op) is QdqKind.PER_TENSOR:
        return FoundSite(form=REQUANTIZE, op=op, quantize=quantize)
    activation = None
    if is_call(op, CLAMPS) and not is_dequantize(op.all_input_nodes[0]):
        activation, op = op, op.all_input_nodes[0]
    if cast_booleans(op) is not None:
        return FoundSite(form=BOOLEANS, op=op, activation=activation, quantize=quantize)
    if cast_integers(op) is not None:
        return FoundSite(form=INTEGERS, op=op, activation=activation, quantize=quantize)
    form = form_of(op)
    if form is None or not (reads_integers(op) or masked_scores(op) or is_call(op, ZEROS)):
        return None
    return FoundSite(form=form, op=op, activation=activation, quantize=quantize)


def reads_integers(node: Node) -> bool:
    """True if an operator reads a dequantized value."""
    return any(is_dequantize(source) for source in node.all_input_nodes)


def _is_quantized_by(user: Node) -> bool:
    """True if a reader is a quantize, or a clamp that only quantizes read."""
    if is_call(user, CLAMPS):
        return bool(user.users) and all(_is_static_quantize(n) for n in user.users)
    return _is_static_quantize(user)


def _is_static_quantize(node: Node) -> bool:
    return is_quantize(node) and kind_of_qdq(node) is QdqKind.PER_TENSOR


class Reader:
    """Reads sites of one graph.

    Args:
        editor: of the graph; the forms of the sites insert their nodes through it.
        arithmetic: of all sites.
    """

    def __init__(self, editor: Editor, arithmetic: Arithmetic) -> None:
        self.editor = editor
        self.arithmetic = arithmetic
        self.gm = editor.gm
        self.constants = constant_nodes(editor.graph)

    def site(self, found: FoundSite) -> Site[Node]:
        """Return the site that a form writes."""
        op, editor = found.op, self.editor
        if found.form is REQUANTIZE:
            given: dict[str, Any] = {"self": self.operand(op)}
        else:
            given = {name: self._value(value) for name, value in arguments_of(op).items()}
        like = found.activation or op

        def hold(values: Tensor, what: str) -> Node:
            return editor.constant(f"{op.name}_{what}", values, like=op)

        return Site(
            call=emitter(editor, like if found.form is REQUANTIZE else op),
            hold=hold,
            target=op.target,
            arguments=given,
            output=self._output(found),
            like=op.meta["val"],
            arithmetic=self.arithmetic,
        )

    def operand(self, node: Node) -> Operand[Node] | None:
        """Return the integers that a dequantize reads, None if its layout has no integer form."""
        source = node.args[0]
        assert isinstance(source, Node)
        given: dict[str, Any] = {
            "value": source,
            "like": source.meta["val"],
            "is_constant": self._is_constant(source),
        }
        is_per_token = kind_of_qdq(node) is QdqKind.PER_TOKEN
        if node.target is DequantizePerTensorDynamic or is_per_token:
            return Operand(**given, **_run_time(node))
        if kind_of_qdq(node) not in STATIC_KINDS or not self._has_constant_qparams(node):
            return None
        return Operand(**given, qparams=read_qparams(self.gm, node))

    def _value(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._value(v) for v in value]
        if not isinstance(value, Node):
            return value
        if is_dequantize(value):
            return self._dequantized(value)
        # Constants of places and booleans stay nodes, as those that are computed.
        is_real = value in self.constants and value.meta["val"].is_floating_point()
        held = constant_of(self.gm, value) if is_real else None
        return value if held is None else held

    def _dequantized(self, node: Node) -> Any:
        source = node.args[0]
        assert isinstance(source, Node)
        operand = self.operand(node)
        if operand is None:
            return node
        if source.meta["val"].dtype is torch.int32 and operand.is_constant:
            integers = constant_of(self.gm, source)  # a bias
            return node if integers is None else dequantize(integers, operand.qparams)
        return operand

    def _output(self, found: FoundSite) -> Output | None:
        if found.quantize is None:
            return None
        qparams = read_qparams(self.gm, found.quantize)
        storage = found.quantize.meta["val"].dtype
        return Output(qparams=qparams, range=output_range(qparams, storage, found.bounds))

    def _is_constant(self, node: Node) -> bool:
        """True if integers are fixed: a constant, or (not folded) the quantize of one."""
        return node in self.constants or (
            is_quantize(node) and node.all_input_nodes[0] in self.constants
        )

    def _has_constant_qparams(self, node: Node) -> bool:
        scale = node.args[1]
        return not isinstance(scale, Node) or scale in self.constants


def _run_time(node: Node) -> dict[str, Any]:
    """The limits of a dequantize whose scale and zero point are chosen at run time."""
    args: Any = node.args
    nominal = QParams.per_tensor(1.0, 0, args[3], args[4], args[5])
    return {"qparams": nominal, "run_time": (args[1], args[2])}


def emitter(editor: Editor, like: Node) -> Call[Node]:
    """Calls become nodes with the trace of another, before the match's anchor."""

    def call(target: Any, *args: Any, **kwargs: Any) -> Node:
        return editor.call(target, *args, like=like, **kwargs)

    return call


def literal(editor: Editor, values: Tensor, name: str, like: Node) -> Any:
    """One number as it is, several as a constant."""
    if values.numel() == 1:
        return values.item()
    return editor.constant(name, values, like=like)
