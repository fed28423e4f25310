"""Rules of the integer reference: linear and convolutions, static or with a dynamic input."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.integer import requantize_scale
from pt2e_quant.core.integer_ops.calls import Call, cast
from pt2e_quant.core.integer_ops.products import Window, convolve, multiply_rows
from pt2e_quant.core.integer_ops.requantize import requantize
from pt2e_quant.core.qdq import (
    DequantizePerChannel,
    DequantizePerTensor,
    is_quantize,
    read_qparams,
)
from pt2e_quant.core.qparams import dequantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import CONV, LINEAR, argument, arguments, aten, is_call
from pt2e_quant.graph.pattern import Match, Op, Var, chain
from pt2e_quant.graph.rewrite import Rule, Skip
from pt2e_quant.passes.reference.integer_operands import (
    ACTIVATION,
    QUANTIZE,
    Operand,
    dequantized,
    emitter,
    literal,
    output_of,
)

__all__ = ["PRODUCT_RULES"]

_INT32 = (1 << 31) - 1
_DEQUANTIZE_DYNAMIC = torch.ops.quantized_decomposed.dequantize_per_tensor.tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """One linear or convolution, ready to be written.

    Args:
        op: the float operator.
        weight: its integers.
        window: of a convolution.
        channels: shape in which one number for each output channel meets the result.
    """

    op: Node
    weight: Operand
    window: Window | None
    channels: tuple[int, ...]

    def per_channel(self, values: Tensor) -> Tensor:
        """Values for all channels, or for each, shaped to broadcast against the result."""
        return values if values.numel() == 1 else values.reshape(self.channels)

    @property
    def weight_zeros(self) -> Tensor:
        """The weight's zero points, shaped to broadcast against the weight."""
        zeros = self.weight.qparams.zero_point
        rank = self.weight.node.meta["val"].dim()
        return zeros if zeros.numel() == 1 else zeros.reshape(-1, *[1] * (rank - 1))

    def accumulate(
        self, call: Call[Node], editor: Editor, x: Node, x_zero: Any, bias: Node | None
    ) -> Node:
        """The exact sum of products in int32."""
        zeros = self.weight_zeros
        w_zero: Any = 0
        if bool((zeros != 0).any()):
            w_zero = literal(editor, zeros, f"{self.op.name}_weight_zero", self.op)
        given: dict[str, Any] = {
            "x_zero_point": x_zero,
            "weight_zero_point": w_zero,
            "x_storage": x.meta["val"].dtype,
            "weight_storage": self.weight.storage,
        }
        weight = self.weight.node
        total: Node
        if self.window is None:
            total = multiply_rows(call, x, weight, bias, **given)
        else:
            total = convolve(call, x, weight, bias, self.window, **given)
        return total


def _product(m: Match, gm: GraphModule) -> _Product | Skip:
    op = m.nodes["op"]
    if not _is_weight(m) or not _has_constant_qparams(m.nodes["dq_w"]):
        return Skip("weight or its scale is no constant of this graph")
    weight = Operand.of(gm, m.nodes["dq_w"])
    if weight.qparams.axis not in (None, 0):
        return Skip(f"weight is quantized along axis {weight.qparams.axis}")
    if weight.qparams.zero_point.is_floating_point():
        return Skip("weight has zero points that are no integers")
    if is_call(op, LINEAR):
        return _Product(op=op, weight=weight, window=None, channels=(-1,))
    window = _window(op)
    if isinstance(window, Skip):
        return window
    channels = (-1, *[1] * len(window.stride))
    return _Product(op=op, weight=weight, window=window, channels=channels)


def _is_weight(m: Match) -> bool:
    """Whether a weight is a constant, or (not folded) the quantize of one."""
    node = m.node("w")
    return m.is_constant("w") or (is_quantize(node) and m.walk.is_constant(node.all_input_nodes[0]))


def _has_constant_qparams(dequantize_node: Node) -> bool:
    scale = dequantize_node.args[1]
    return not isinstance(scale, Node) or scale.op == "get_attr"


def _window(op: Node) -> Window | Skip:
    given = arguments(op)
    kernel = given["weight"].meta["val"].shape[2:]
    rank = len(kernel)
    if given["input"].meta["val"].dim() != rank + 2:
        return Skip("input has no batch dimension")
    dilation = _each(given["dilation"], rank)
    padding = given["padding"]
    if padding == "valid":
        padding = [0] * rank
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if any(t % 2 for t in total):
            return Skip('padding "same" is uneven')
        padding = [t // 2 for t in total]
    return Window(
        stride=_each(given["stride"], rank),
        padding=_each(padding, rank),
        dilation=dilation,
        groups=given["groups"],
    )


def _each(given: Sequence[int], rank: int) -> list[int]:
    return list(given) * rank if len(given) == 1 else list(given)


def _static(m: Match, editor: Editor) -> Node | Skip:
    product = _product(m, editor.gm)
    if isinstance(product, Skip):
        return product
    x = Operand.of(editor.gm, m.nodes["dq_x"])
    scale = x.qparams.scale * product.weight.qparams.scale
    bias = _bias(editor.gm, product.op, scale)
    if isinstance(bias, Skip):
        return bias
    most = _terms(product) * x.reach * product.weight.reach
    if most + (0 if bias is None else int(bias.abs().max())) > _INT32:
        return Skip("the sum of products may not fit in int32")
    output = output_of(editor, m) if "q" in m.nodes else None
    if output is not None and not output[1].is_exact:
        return Skip("the output's integers are wider than float32 holds")
    call = emitter(editor, product.op)
    held = None
    if bias is not None:
        shaped = bias.to(torch.int32).reshape(product.channels)
        held = editor.constant(_named(product.op, "bias_q"), shaped, like=product.op)
    total = product.accumulate(call, editor, x.node, x.qparams.zero_point_int, held)
    if output is None:
        return _as_float(call, editor, product, total, scale)
    factor = requantize_scale(x.qparams.scale, product.weight.qparams.scale, output[0].scale)
    name = _named(product.op, "factor")
    held_factor: float | Node = literal(editor, product.per_channel(factor), name, product.op)
    return requantize(call, total, held_factor, output[1])


def _as_float(
    call: Call[Node], editor: Editor, product: _Product, total: Node, scale: Tensor
) -> Node:
    """A result that stays float: the accumulator times its scale."""
    held = literal(editor, product.per_channel(scale), _named(product.op, "scale"), product.op)
    real = call(aten.mul.Tensor, cast(call, total, torch.float32), held)
    dtype = product.op.meta["val"].dtype
    return real if dtype is torch.float32 else cast(call, real, dtype)


def _dynamic(m: Match, editor: Editor) -> Node | Skip:
    """An input whose qparams are chosen at run time; the bias stays float."""
    product = _product(m, editor.gm)
    if isinstance(product, Skip):
        return product
    low, high = m.nodes["dq_x"].args[3:5]
    if _terms(product) * (int(high) - int(low)) * product.weight.reach > _INT32:  # type: ignore[arg-type]  # literals by schema
        return Skip("the sum of products may not fit in int32")
    call = emitter(editor, product.op)
    total = product.accumulate(call, editor, m.node("x"), _zero_point(call, m), None)
    weight_scale = product.per_channel(product.weight.qparams.scale)
    held = literal(editor, weight_scale, _named(product.op, "scale"), product.op)
    scale = call(aten.mul.Tensor, cast(call, m.node("s"), torch.float32), held)
    real = call(aten.mul.Tensor, cast(call, total, torch.float32), scale)
    bias = argument(product.op, "bias")
    if isinstance(bias, Node):
        shaped = call(aten.reshape.default, bias, list(product.channels))
        real = call(aten.add.Tensor, real, shaped)
    dtype = product.op.meta["val"].dtype
    return real if dtype is torch.float32 else cast(call, real, dtype)


def _zero_point(call: Call[Node], m: Match) -> Node:
    """The chosen zero point in the width of the difference, so that nothing is promoted."""
    x, zero = m.node("x"), m.node("z")
    wide = torch.int16 if x.meta["val"].dtype.itemsize == 1 else torch.int32
    return cast(call, zero, wide)


def _terms(product: _Product) -> int:
    """How many products one sum has."""
    value = product.weight.node.meta["val"]
    return int(value.numel() // max(1, value.shape[0]))


def _bias(gm: GraphModule, op: Node, scale: Tensor) -> Tensor | Skip | None:
    """The bias in steps of the accumulator: int64[N], None if there is none."""
    bias = argument(op, "bias")
    if bias is None:
        return None
    value = _value(gm, bias)
    if value is None:
        return Skip("bias is computed at run time")
    return torch.round(value.double() / scale.double()).to(torch.int64)


def _value(gm: GraphModule, node: Node) -> Tensor | None:
    if node.target in (DequantizePerTensor, DequantizePerChannel):
        if not _has_constant_qparams(node):
            return None
        integers = constant_of(gm, node.args[0])  # type: ignore[arg-type]  # a node by schema
        return None if integers is None else dequantize(integers, read_qparams(gm, node))
    return constant_of(gm, node)


def _named(op: Node, what: str) -> str:
    return f"{op.name}_{what}"


_WEIGHT = Op((DequantizePerTensor, DequantizePerChannel), Var("w"), name="dq_w")
_STATIC = tuple(Op(family, dequantized("x"), _WEIGHT, name="op") for family in (LINEAR, CONV))
_DYNAMIC_INPUT = Op(_DEQUANTIZE_DYNAMIC, Var("x"), Var("s"), Var("z"), name="dq_x")

PRODUCT_RULES = (
    Rule(
        "products to integers",
        find=tuple(op for first in _STATIC for op in chain(first, ACTIVATION, QUANTIZE)),
        build=_static,
    ),
    Rule("products to float", find=_STATIC, build=_static),
    Rule(
        "products of a dynamic input",
        find=tuple(Op(family, _DYNAMIC_INPUT, _WEIGHT, name="op") for family in (LINEAR, CONV)),
        build=_dynamic,
    ),
)
"""Linear and convolutions with constant integer weights."""
