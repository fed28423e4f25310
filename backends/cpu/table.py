"""What oneDNN runs in integers from torch's own CPU build, as data.

Weights are int8 per output channel with zero_point 0, activations uint8: with int8 activations
oneDNN falls back to a reference loop, or refuses. Results are quantized where what reads them
is: no row has an output of its own except those that only move data.
"""

from pt2e_quant.kernels.conditions import (
    ADDS_EQUAL_SHAPES,
    ADDS_UNSCALED,
    BATCHED_1D,
    BATCHED_2D,
    BETWEEN_INTEGERS,
    LIMITS_ARE_NUMBERS,
    NO_INDICES,
)
from pt2e_quant.core.schemes import INT8_WEIGHT, UINT8_ACTIVATION, Role
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import OUT, Constraint, OpRow, OpTable, Slot
from pt2e_quant.graph.ops import Family
from pt2e_quant.graph.pattern import Many, Op, Var, chain, either_order, maybe, one_of

__all__ = ["CLIPS", "CONV_POST_OPS", "LINEAR_POST_OPS", "TABLE"]

CLIPS = one_of(ops.RELU6, ops.HARDTANH, ops.CLAMP)
"""Post-op "hardtanh"."""
CONV_POST_OPS = one_of(ops.RELU, CLIPS, ops.HARDSWISH, ops.SILU)
LINEAR_POST_OPS = one_of(CONV_POST_OPS, ops.GELU, ops.LEAKY_RELU, ops.TANH)

X, Y, W, B = Var("x"), Var("y"), Var("w"), Var("b")
_IN = Slot(at="x", role=Role.INPUT, accepts=(UINT8_ACTIVATION,))
_ADDED = Slot(at="y", role=Role.INPUT, accepts=(UINT8_ACTIVATION,))
_WEIGHT = Slot(at="w", role=Role.WEIGHT, accepts=(INT8_WEIGHT,))
_OUT = Slot(at=OUT, role=Role.OUTPUT, accepts=(UINT8_ACTIVATION,))


def _gemm(
    name: str, family: Family, post_ops: Family, lowers_to: str, *needs: Constraint
) -> tuple[OpRow, OpRow]:
    """A convolution or linear, and the same with an activation function fused."""
    alone = Op(family, X, W, B, name="op")
    note = "the result is uint8 where what reads it takes that, else float"
    return (
        OpRow(
            name=name,
            find=(alone,),
            slots=(_IN, _WEIGHT),
            constraints=needs,
            lowers_to=lowers_to,
            note=note,
        ),
        OpRow(
            name=f"{name}_activation",
            find=chain(alone, post_ops),
            slots=(_IN, _WEIGHT),
            constraints=(*needs, LIMITS_ARE_NUMBERS),
            lowers_to=lowers_to,
            note=note,
        ),
    )


def _gemm_add(
    name: str,
    family: Family,
    added: tuple[Slot, ...],
    lowers_to: str,
    *needs: Constraint,
    note: str,
) -> OpRow:
    """A convolution or linear, a residual added to it, and perhaps a relu."""
    return OpRow(
        name=f"{name}_add",
        find=chain(
            either_order(ops.ADD, Op(family, X, W, B, name="op"), Y, name="add"),
            maybe(ops.RELU, "clip"),
        ),
        slots=(_IN, _WEIGHT, *added),
        constraints=(*needs, ADDS_UNSCALED, ADDS_EQUAL_SHAPES),
        lowers_to=lowers_to,
        note=note,
    )


def _moves(name: str, family: Family, lowers_to: str, *needs: Constraint) -> OpRow:
    return OpRow(
        name=name,
        find=(Op(family, X, name="op"),),
        slots=(_IN, _OUT),
        share=(("x", OUT),),
        constraints=(BETWEEN_INTEGERS, *needs),
        lowers_to=lowers_to,
    )


_QCONV, _QLINEAR = "onednn.qconv_pointwise", "onednn.qlinear_pointwise"
_GEMMS = (
    *_gemm("conv1d", ops.CONV1D, one_of(ops.RELU), _QCONV, BATCHED_1D),
    *_gemm("conv2d", ops.CONV2D, CONV_POST_OPS, _QCONV, BATCHED_2D),
    *_gemm("linear", ops.LINEAR, LINEAR_POST_OPS, _QLINEAR),
    _gemm_add(
        "conv2d",
        ops.CONV2D,
        (_ADDED,),
        "onednn.qconv2d_pointwise.binary",
        BATCHED_2D,
        note="a relu after the sum is fused",
    ),
    _gemm_add(
        "linear",
        ops.LINEAR,
        (),
        "onednn.qlinear_pointwise.binary",
        note="what is added stays float: it is a transformer's residual stream",
    ),
)
_MOVERS = (
    _moves("max_pool2d", ops.MAX_POOL2D, "quantized.max_pool2d", NO_INDICES),
    _moves("reshape", one_of(ops.RESHAPE, ops.SQUEEZE, ops.UNSQUEEZE), "the same on uint8"),
    _moves("permute", ops.PERMUTE, "the same on uint8"),
    _moves("slice", one_of(ops.SLICE, ops.SELECT), "the same on uint8"),
    OpRow(
        name="cat",
        find=(Op(ops.CAT, Many("x"), name="op"),),
        slots=(_IN, _OUT),
        share=(("x", OUT),),
        constraints=(BETWEEN_INTEGERS,),
        lowers_to="aten.cat on uint8",
    ),
)

TABLE = OpTable(
    backend="oneDNN",
    rows=(*_GEMMS, *_MOVERS),
    reasons={
        "aten.conv3d": "oneDNN's int8 conv3d is in torch, but nothing here fuses it",
        "aten.conv_transpose1d": "torch has no integer transposed convolution of oneDNN",
        "aten.conv_transpose2d": "torch has no integer transposed convolution of oneDNN",
        "aten.conv_transpose3d": "torch has no integer transposed convolution of oneDNN",
        "aten.add": "an add that follows no convolution or linear is bound by memory in float too",
        "aten.mul": "a product of two tensors is bound by memory in float too",
        "aten.avg_pool2d": "torch has no integer average pooling of oneDNN",
        "aten.adaptive_avg_pool2d": "torch has no integer average pooling of oneDNN",
        "aten.mean": "torch has no integer mean of oneDNN",
        "aten.matmul": "oneDNN's int8 product of two run-time matrices is not in torch",
        "aten.bmm": "oneDNN's int8 product of two run-time matrices is not in torch",
        "aten.scaled_dot_product_attention": "torch's attention kernel for CPUs is float",
        "aten.layer_norm": "torch has no integer layer_norm",
        "aten.softmax": "torch has no integer softmax of oneDNN",
        "aten.embedding": "a look-up of float rows costs what the rows cost, not the table",
    },
)
