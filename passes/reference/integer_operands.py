"""What a q/dq pattern says of its tensors (integers, qparams, limits), and how to make nodes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.integer_ops.calls import Call
from pt2e_quant.core.integer_ops.requantize import OutputRange, output_range
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor, read_qparams
from pt2e_quant.core.qparams import QParams
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import CLAMP, HARDTANH, RELU, RELU6, arguments, is_call
from pt2e_quant.graph.pattern import Match, Op, Step, Var, maybe, one_of, step

__all__ = ["ACTIVATION", "QUANTIZE", "Operand", "dequantized", "emitter", "literal", "output_of"]

QUANTIZE: Step = step((QuantizePerTensor,), "q")
"""The quantize that ends a pattern."""

ACTIVATION: Step = maybe(step(one_of(RELU, RELU6, HARDTANH, CLAMP), "act"))
"""A clamp that may stand before it; its bounds become integers."""


def dequantized(name: str) -> Op:
    """The pattern of a tensor that is dequantized per tensor; the dequantize is "dq_<name>"."""
    return Op(DequantizePerTensor, Var(name), name=f"dq_{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor that a pattern reads in integers.

    Args:
        node: holds the integers.
        qparams: what they mean.
        storage: dtype of the integers.
    """

    node: Node
    qparams: QParams
    storage: torch.dtype

    @staticmethod
    def of(gm: GraphModule, dequantize: Node) -> "Operand":
        """Read from a static dequantize."""
        node = dequantize.args[0]
        assert isinstance(node, Node)
        return Operand(
            node=node, qparams=read_qparams(gm, dequantize), storage=node.meta["val"].dtype
        )

    @property
    def reach(self) -> int:
        """The greatest abs(q - zero_point)."""
        zero = self.qparams.zero_point
        low, high = self.qparams.quant_min - zero, self.qparams.quant_max - zero
        return int(torch.maximum(low.abs().max(), high.abs().max()))


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


def output_of(editor: Editor, m: Match) -> tuple[QParams, OutputRange]:
    """The qparams of a pattern's output, and its range after the activation."""
    quantize = m.nodes["q"]
    qparams = read_qparams(editor.gm, quantize)
    return qparams, output_range(qparams, quantize.meta["val"].dtype, _bounds(m.nodes.get("act")))


def _bounds(activation: Node | None) -> tuple[float | None, float | None]:
    if activation is None:
        return None, None
    if is_call(activation, RELU6):
        return 0.0, 6.0
    if is_call(activation, RELU):
        return 0.0, None
    found = arguments(activation)
    names = ("min_val", "max_val") if is_call(activation, HARDTANH) else ("min", "max")
    return found[names[0]], found[names[1]]
