"""The op table of ONNX Runtime's CPU provider: what it runs in integers.

Every row was proven by lowering it, running it and counting operators in the model that ONNX
Runtime optimized; `tests/backends/onnx/test_table.py` does so again.
"""

from typing import Any

import torch
from torch.fx import Node

from pt2e_quant.backends.onnx.code_rows import CODE_ROWS, sixteen_bit_rows
from pt2e_quant.backends.onnx.low_bit_rows import LOW_BIT_ROWS
from pt2e_quant.backends.onnx.passes.recurrent import RECURRENT_ROW
from pt2e_quant.core.granularity import PerChannel
from pt2e_quant.core.schemes import (
    BIAS_INT32,
    INT8_WEIGHT,
    INT8_WEIGHT_ROWS,
    UINT8_ACTIVATION,
    Role,
    TensorScheme,
)
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import (
    ADDS_UNSCALED,
    GLOBAL_MEAN,
    LIMITS_ARE_LITERALS,
    NO_INDICES,
    POOLS_TO_ONE,
    TENSOR_OPERANDS,
    rank_of,
)
from pt2e_quant.graph.op_table import OUT, Constraint, OpKind, OpRow, OpTable, Slot
from pt2e_quant.graph.pattern import Many, Match, Op, Var, chain, one_of
from pt2e_quant.graph.sum_lengths import limit_sums

aten: Any = torch.ops.aten

CLIPS = one_of(ops.RELU, ops.RELU6, ops.HARDTANH, ops.CLAMP, (aten.clamp_min.default,))
X, Y, W, B = Var("x"), Var("y"), Var("w"), Var("b")
COLUMNS = TensorScheme(
    dtype=torch.int8,
    granularity=PerChannel(axis=1),
    symmetric=True,
    quant_min=-127,
    quant_max=127,
)
SIGMOID_RANGE = (1 / 256, 0)


def _has_matrix_weight(node: Node) -> bool:
    """True if the right operand has two dimensions, as a linear layer's weight."""
    return len(node.args) > 1 and rank_of(node.args[1]) == 2


def _is_call(node: Node) -> bool:
    """Always true: its being there sets this pattern apart from that of a constant weight."""
    return node.op == "call_function"


_FOR_INFINITY = 1e4
"""Numbers from here on stand for infinity where a model pads with them."""


def _pads_with_a_number(match: Match) -> bool:
    found = ops.arguments(match.anchor)
    if found.get("mode", "constant") not in ("constant", "reflect", "replicate"):
        return False
    value = found.get("value")
    # One step of a range that reaches a number for infinity is wider than all values beside it.
    return value is None or (isinstance(value, (int, float)) and abs(value) < _FOR_INFINITY)


BOTH_ARE_COMPUTED = Constraint(
    text="two computed tensors",
    holds=lambda match: not match.is_constant("x") and not match.is_constant("y"),
)
# QLinearAveragePool divides the last windows of `ceil_mode` by too much.
NO_CEIL = Constraint(
    text="no ceil_mode", holds=lambda match: not ops.argument(match.anchor, "ceil_mode")
)
NO_DIVISOR = Constraint(
    text="no divisor_override",
    holds=lambda match: ops.argument(match.anchor, "divisor_override") is None,
)
PADS_WITH_A_NUMBER = Constraint(
    text=f"constant below {_FOR_INFINITY:g}, reflect or replicate", holds=_pads_with_a_number
)


def _input(at: str) -> Slot:
    return Slot(at=at, role=Role.INPUT, accepts=(UINT8_ACTIVATION,))


def _weight(at: str, scheme: TensorScheme = INT8_WEIGHT) -> Slot:
    return Slot(at=at, role=Role.WEIGHT, accepts=(scheme,))


def _bias(at: str = "b") -> Slot:
    """An int32 bias on the accumulator's scale; it must be so in the canonical graph already.

    A bias that is rounded only while lowering moves one value in a thousand by one step, and
    what follows makes more of it.
    """
    return Slot(
        at=at,
        role=Role.BIAS,
        accepts=(BIAS_INT32,),
        is_optional=True,
        derived_from=("x", "w"),
    )


def _output(fixed: tuple[float, int] | None = None) -> Slot:
    return Slot(at=OUT, role=Role.OUTPUT, accepts=(UINT8_ACTIVATION,), fixed=fixed)


def _with_clip(
    name: str,
    find: tuple[Op, ...],
    slots: tuple[Slot, ...],
    lowers_to: str,
    *needs: Constraint,
    kind: OpKind = OpKind.HEAVY,
) -> tuple[OpRow, OpRow]:
    """A row, and one for the same followed by relu, relu6 or another clip."""
    clipped = tuple(op for alone in find for op in chain(alone, _CLIP_STEP))
    return (
        OpRow(name=name, find=find, slots=slots, lowers_to=lowers_to, constraints=needs, kind=kind),
        OpRow(
            name=f"{name}_clip",
            find=clipped,
            slots=slots,
            lowers_to=lowers_to,
            constraints=(*needs, LIMITS_ARE_LITERALS),
            kind=kind,
            note="the clip costs nothing where the output's range lies inside it",
        ),
    )


def _moves(name: str, overloads: ops.Overloads, lowers_to: str, *needs: Constraint) -> OpRow:
    """A row for an operator that only moves values: one set of qparams, in and out."""
    return OpRow(
        name=name,
        find=(Op(overloads, X),),
        slots=(_input("x"), _output()),
        share=(("x", OUT),),
        lowers_to=lowers_to,
        constraints=needs,
        kind=OpKind.MOVES,
    )


def _merges(name: str, find: tuple[Op, ...], inputs: tuple[str, ...], lowers_to: str) -> OpRow:
    """A row for an operator that puts several tensors together on one set of qparams."""
    return OpRow(
        name=name,
        find=find,
        slots=(*(_input(at) for at in inputs), _output()),
        share=((*inputs, OUT),),
        lowers_to=lowers_to,
        kind=OpKind.MOVES,
    )


def _maps(
    name: str,
    overloads: ops.Overloads,
    lowers_to: str,
    *needs: Constraint,
    fixed: tuple[float, int] | None = None,
) -> OpRow:
    """A row for an operator of one tensor whose result has qparams of its own."""
    return OpRow(
        name=name,
        find=(Op(overloads, X),),
        slots=(_input("x"), _output(fixed)),
        lowers_to=lowers_to,
        constraints=needs,
        kind=OpKind.LIGHT,
    )


_CLIP_STEP = CLIPS
_CONVS = {"conv1d": ops.CONV1D, "conv2d": ops.CONV2D, "conv3d": ops.CONV3D}
_CONV_ROWS = tuple(
    row
    for name, overloads in _CONVS.items()
    for row in _with_clip(
        name,
        (Op(overloads, X, W, B, name="op"),),
        (_input("x"), _weight("w"), _bias(), _output()),
        "QLinearConv",
    )
)
_LINEAR_ROWS = (
    OpRow(
        name="linear",
        find=(Op(ops.LINEAR, X, W, B),),
        slots=(_input("x"), _weight("w"), _bias()),
        lowers_to="QGemm (2-D) or MatMulIntegerToFloat",
        note="the result is float: what reads it rounds it, if it must",
    ),
    OpRow(
        name="addmm",
        find=(Op(ops.ADDMM, B, X, W),),
        slots=(_input("x"), _weight("w", COLUMNS), _bias()),
        lowers_to="QGemm",
        constraints=(ADDS_UNSCALED,),
    ),
    OpRow(
        name="mm",
        find=(Op(one_of(ops.MM, ops.MATMUL), X, W, where=_has_matrix_weight),),
        slots=(_input("x"), _weight("w", COLUMNS)),
        lowers_to="MatMulIntegerToFloat",
    ),
    OpRow(
        name="embedding",
        find=(Op(ops.EMBEDDING, W),),
        slots=(_weight("w", INT8_WEIGHT_ROWS),),
        lowers_to="Gather on int8, then the found rows to float",
    ),
)
_PAIR = (_input("x"), _input("y"), _output())
_LIGHT = OpKind.LIGHT
SUM = (TENSOR_OPERANDS, ADDS_UNSCALED)
_ARITHMETIC_ROWS = (
    *_with_clip("add", (Op(ops.ADD, X, Y),), _PAIR, "QLinearAdd", *SUM, kind=_LIGHT),
    *_with_clip("sub", (Op(ops.SUB, X, Y),), _PAIR, "BitwiseNot, QLinearAdd", *SUM, kind=_LIGHT),
    *_with_clip("mul", (Op(ops.MUL, X, Y),), _PAIR, "QLinearMul", TENSOR_OPERANDS, kind=_LIGHT),
    OpRow(
        name="matmul",
        find=(Op(one_of(ops.MATMUL, ops.BMM), X, Y, where=_is_call),),
        slots=_PAIR,
        lowers_to="QLinearMatMul",
        constraints=(BOTH_ARE_COMPUTED,),
        kind=OpKind.LIGHT,
        note="attention stays float: its inputs are results of linears",
    ),
    _maps("sigmoid", ops.SIGMOID, "QLinearSigmoid", fixed=SIGMOID_RANGE),
    _maps("softmax", ops.SOFTMAX, "QLinearSoftmax", fixed=SIGMOID_RANGE),
    _maps("leaky_relu", ops.LEAKY_RELU, "QLinearLeakyRelu"),
    _maps("avg_pool1d", ops.AVG_POOL1D, "QLinearAveragePool", NO_CEIL),
    _maps("avg_pool2d", ops.AVG_POOL2D, "QLinearAveragePool", NO_DIVISOR, NO_CEIL),
    _maps(
        "adaptive_avg_pool",
        one_of(
            ops.ADAPTIVE_AVG_POOL1D, ops.ADAPTIVE_AVG_POOL2D, (aten.adaptive_avg_pool3d.default,)
        ),
        "QLinearGlobalAveragePool",
        POOLS_TO_ONE,
    ),
    _maps("mean", ops.MEAN, "QLinearGlobalAveragePool", GLOBAL_MEAN),
)
_MOVING_ROWS = (
    _moves("clip", CLIPS, "Clip (uint8)", LIMITS_ARE_LITERALS),
    _moves(
        "max_pool",
        one_of(ops.MAX_POOL1D, ops.MAX_POOL2D, ops.MAX_POOL3D),
        "MaxPool (uint8)",
        NO_INDICES,
    ),
    _moves("amax", (aten.amax.default,), "ReduceMax (uint8)"),
    _moves("amin", (aten.amin.default,), "ReduceMin (uint8)"),
    _moves("reshape", ops.RESHAPE, "Reshape (uint8)"),
    _moves("unsqueeze", ops.UNSQUEEZE, "Unsqueeze (uint8)"),
    _moves("squeeze", ops.SQUEEZE, "Squeeze (uint8)"),
    _moves("permute", ops.PERMUTE, "Transpose (uint8)"),
    _moves("expand", ops.EXPAND, "Expand (uint8)"),
    _moves("repeat", (aten.repeat.default, aten.tile.default), "Tile (uint8)"),
    _moves("slice", ops.SLICE, "Slice (uint8)"),
    _moves("select", ops.SELECT, "Gather (uint8)"),
    _moves("index_select", (aten.index_select.default,), "Gather (uint8)"),
    _moves("identity", ops.IDENTITIES, "nothing"),
    _moves("pixel_shuffle", (aten.pixel_shuffle.default,), "DepthToSpace (uint8)"),
    _moves("pixel_unshuffle", (aten.pixel_unshuffle.default,), "SpaceToDepth, Gather (uint8)"),
    _moves("flip", (aten.flip.default,), "Slice (uint8)"),
    _moves("pad", ops.PAD, "Pad (uint8)", PADS_WITH_A_NUMBER),
    _moves(
        "upsample_nearest",
        (aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec),
        "Resize (uint8), Gather (uint8)",
    ),
    _merges("cat", (Op(ops.CAT, Many("xs")),), ("xs",), "QLinearConcat"),
    _merges("where", (Op(aten.where.self, Var("condition"), X, Y),), ("x", "y"), "QLinearWhere"),
    _merges("maximum", (Op(ops.MAXIMUM, X, Y),), ("x", "y"), "Max (uint8)"),
    _merges("minimum", (Op(ops.MINIMUM, X, Y),), ("x", "y"), "Min (uint8)"),
)

_SIXTEEN_BIT_ROWS = sixteen_bit_rows(
    (
        *_CONV_ROWS,
        *_with_clip(
            "linear",
            (Op(ops.LINEAR, X, W, B),),
            (_input("x"), _weight("w"), _output()),
            "Gemm or MatMul",
        ),
        *_ARITHMETIC_ROWS,
        *_MOVING_ROWS,
    ),
    integer_limits=(GLOBAL_MEAN, NO_CEIL, NO_DIVISOR, POOLS_TO_ONE),
)

_TRANSPOSED = (
    "ONNX Runtime has no integer ConvTranspose; it is written as a convolution whose channels "
    "are moved to places, where that did not measure slower"
)
_REASONS = {
    "aten.conv_transpose1d": _TRANSPOSED,
    "aten.conv_transpose2d": _TRANSPOSED,
    "aten.conv_transpose3d": "ONNX Runtime has no integer ConvTranspose",
    "aten.layer_norm": "ONNX Runtime has no integer LayerNormalization",
    "aten.gelu": "ONNX Runtime has no integer Gelu; a look-up table measured slower than float",
    "aten.silu": "ONNX Runtime has no integer SiLU; a look-up table measured slower than float",
    "aten.tanh": "ONNX Runtime has no integer Tanh; a look-up table measured slower than float",
    "aten.hardswish": "ONNX Runtime has no integer HardSwish; a look-up table measured slower "
    "than float",
    "aten.upsample_bilinear2d": "ONNX Runtime's integer Resize truncates: half a step of bias",
    "aten.div": "ONNX Runtime has no integer Div",
    "aten.scaled_dot_product_attention": "ONNX Runtime's attention computes in float",
}

STATIC_TABLE = OpTable(
    backend="ONNX Runtime",
    rows=limit_sums((*_CONV_ROWS, *_LINEAR_ROWS, *_ARITHMETIC_ROWS, *_MOVING_ROWS)),
    reasons=_REASONS,
)
"""The rows of scheme int8: between such operators integers flow."""
TABLE = OpTable(
    backend="ONNX Runtime",
    rows=(
        *STATIC_TABLE.rows,
        *_SIXTEEN_BIT_ROWS,
        *limit_sums(LOW_BIT_ROWS),
        *CODE_ROWS,
        RECURRENT_ROW,
    ),
    reasons=_REASONS,
)
