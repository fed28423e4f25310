"""Op-table entries of operators with constant weights: static, dynamic and weight-only products."""

from dataclasses import replace

import torch

from pt2e_quant.backends.xnnpack.conditions import (
    ENDS_WITHIN_A_STRIDE,
    EVEN_COLUMNS,
    NOT_DEPTHWISE,
    ONE_GROUP,
    ONE_IMAGE,
    SEVERAL_COLUMNS,
    WEIGHT_IS_MATRIX,
)
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.granularity import PerChannel, PerTensor, PerToken
from pt2e_quant.core.scheme_names import activation_scheme, weight_scheme
from pt2e_quant.core.schemes import (
    INT8_ACTIVATION,
    INT8_WEIGHT,
    INT8_WEIGHT_ONLY,
    INT8_WEIGHT_ROWS,
    Role,
    TensorScheme,
)
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import BATCHED_1D, BATCHED_2D, LIMITS_ARE_LITERALS
from pt2e_quant.graph.op_table import OUT, Constraint, OpRow, Slot
from pt2e_quant.graph.ops import Overloads, aten
from pt2e_quant.graph.pattern import Op, Var, chain, maybe, one_of

CLIPS = one_of(
    ops.RELU, ops.RELU6, ops.HARDTANH, ops.CLAMP, (aten.clamp_min.default, aten.clamp_max.default)
)
"""Activations that the delegate fuses into the operator before them, or runs alone."""

GROUP_SIZES = (32, 64, 128, 256)
"""Group sizes of int4 weights that have a row: the kernels take any multiple of 32."""

BFLOAT16_SCALES = ScaleFormat(precision=torch.bfloat16)
"""The dtype that the delegate rounds scales of groups to."""

INT4_ROWS = weight_scheme(4)
INT4_GROUPS = tuple(weight_scheme(4, size) for size in GROUP_SIZES)
INT4_BFLOAT16_GROUPS = tuple(
    replace(scheme, scales=ScaleFormat(dtype=torch.bfloat16)) for scheme in INT4_GROUPS
)
"""Kept in bfloat16 in the graph, too."""
_X, _W, _B = Var("x"), Var("w"), Var("b")


def _int8_weight(granularity: PerTensor | PerChannel) -> TensorScheme:
    return TensorScheme(
        dtype=torch.int8, granularity=granularity, symmetric=True, quant_min=-127, quant_max=127
    )


_IN = Slot(at="x", role=Role.INPUT, accepts=(INT8_ACTIVATION,))
_OUT = Slot(at=OUT, role=Role.OUTPUT, accepts=(INT8_ACTIVATION,))
_ROWS = Slot(at="w", role=Role.WEIGHT, accepts=(INT8_WEIGHT, _int8_weight(PerTensor())))
_COLUMNS = Slot(
    at="w",
    role=Role.WEIGHT,
    accepts=(_int8_weight(PerChannel(axis=1)), _int8_weight(PerTensor())),
)


def _static(
    name: str, overloads: Overloads, lowers_to: str, *needs: Constraint, weight: Slot = _ROWS
) -> OpRow:
    """A convolution or linear with a constant weight, a clip fused."""
    return OpRow(
        name=name,
        find=chain(Op(overloads, _X, _W, _B, name="op"), maybe(CLIPS, "clip")),
        slots=(_IN, weight, _OUT),
        constraints=(*needs, LIMITS_ARE_LITERALS),
        lowers_to=lowers_to,
        note="relu, relu6, hardtanh and clamp after it are fused",
    )


def _float_output(
    name: str,
    overloads: Overloads,
    lowers_to: str,
    *needs: Constraint,
    x: tuple[TensorScheme, ...],
    w: tuple[TensorScheme, ...],
    note: str = "",
) -> OpRow:
    """A product of integers with a float result, or of float with a weight in integers."""
    return OpRow(
        name=name,
        find=(Op(overloads, _X, _W, _B, name="op"),),
        slots=(
            Slot(at="x", role=Role.INPUT, accepts=x),
            Slot(at="w", role=Role.WEIGHT, accepts=w),
        ),
        constraints=needs,
        lowers_to=lowers_to,
        note=note,
    )


STATIC_GEMMS = (
    _static("conv1d", ops.CONV1D, "Conv2d, DepthwiseConv2d", BATCHED_1D),
    _static("conv2d", ops.CONV2D, "Conv2d, DepthwiseConv2d", BATCHED_2D),
    _static(
        "conv_transpose1d",
        ops.CONV_TRANSPOSE1D,
        "ConvTranspose2d",
        BATCHED_1D,
        ONE_GROUP,
        ENDS_WITHIN_A_STRIDE,
        weight=_COLUMNS,
    ),
    _static(
        "conv_transpose2d",
        ops.CONV_TRANSPOSE2D,
        "ConvTranspose2d",
        BATCHED_2D,
        ONE_GROUP,
        ENDS_WITHIN_A_STRIDE,
        weight=_COLUMNS,
    ),
    _static("linear", ops.LINEAR, "FullyConnected", WEIGHT_IS_MATRIX),
)

_PER_TOKEN = (activation_scheme(8, PerToken()),)
_BEHIND = "a bias is added behind it"

DYNAMIC_GEMMS = (
    _float_output(
        "linear_dynamic",
        ops.LINEAR,
        "FullyConnected: qd8-f32-qc8w",
        WEIGHT_IS_MATRIX,
        x=_PER_TOKEN,
        w=(INT8_WEIGHT,),
    ),
    _float_output(
        "linear_dynamic_int4",
        ops.LINEAR,
        "FullyConnected: qd8-f32-qc4w, qd8-f32-qb4w",
        WEIGHT_IS_MATRIX,
        EVEN_COLUMNS,
        x=_PER_TOKEN,
        w=(INT4_ROWS, *INT4_GROUPS, *INT4_BFLOAT16_GROUPS),
        note=f"a scale per row, or per group of {', '.join(map(str, GROUP_SIZES))}; the delegate "
        "rounds scales of groups to bfloat16, and so do the recipes",
    ),
    _float_output(
        "conv2d_dynamic",
        ops.CONV2D,
        "Conv2d: qd8-f32-qc8w",
        BATCHED_2D,
        ONE_IMAGE,
        NOT_DEPTHWISE,
        x=(activation_scheme(8, PerTensor()),),
        w=(INT8_WEIGHT,),
        note='scheme "int8_dynamic_per_tensor"',
    ),
)

WEIGHT_ONLY_GEMMS = (
    _float_output(
        "linear_weight_only",
        ops.LINEAR,
        "FullyConnected: f32-qc8w",
        WEIGHT_IS_MATRIX,
        x=(),
        w=(INT8_WEIGHT_ONLY,),
        note=_BEHIND,
    ),
    _float_output(
        "linear_weight_only_int4",
        ops.LINEAR,
        "FullyConnected: f32-qc4w",
        WEIGHT_IS_MATRIX,
        EVEN_COLUMNS,
        x=(),
        w=(INT4_ROWS,),
        note=_BEHIND,
    ),
)

_PORTABLE = "portable_only=True looks rows and scales up with portable operators instead"

EMBEDDINGS = (
    OpRow(
        name="embedding",
        find=(Op(ops.EMBEDDING, _W, name="op"),),
        slots=(Slot(at="w", role=Role.WEIGHT, accepts=(INT8_WEIGHT_ONLY, INT8_WEIGHT_ROWS)),),
        constraints=(SEVERAL_COLUMNS,),
        lowers_to="quantized_decomposed.embedding_byte, outside the delegate",
        note=_PORTABLE,
    ),
    OpRow(
        name="embedding_int4",
        find=(Op(ops.EMBEDDING, _W, name="op"),),
        slots=(
            Slot(
                at="w",
                role=Role.WEIGHT,
                accepts=(INT4_ROWS, *INT4_GROUPS, *INT4_BFLOAT16_GROUPS),
            ),
        ),
        constraints=(EVEN_COLUMNS,),
        lowers_to="quantized_decomposed.embedding_4bit, outside the delegate",
        note=_PORTABLE,
    ),
)
