"""The op table of ExecuTorch's XNNPACK delegate: what it runs in integers.

Every row is proven by `tests/backends/xnnpack/test_table.py`, which lowers and runs it on two
sizes, with static and with dynamic shapes, and reads the delegate's contents.
"""

from pt2e_quant.backends.xnnpack.conditions import (
    NO_CEIL_IF_DYNAMIC,
    ONE_DYNAMIC_SIZE,
    PADS_IN_INTEGERS,
    STRIDE_FITS_KERNEL,
    TANH_IS_EXACT,
    WINDOW_IS_WHOLE,
)
from pt2e_quant.backends.xnnpack.gemm_rows import (
    CLIPS,
    DYNAMIC_GEMMS,
    EMBEDDINGS,
    STATIC_GEMMS,
    WEIGHT_ONLY_GEMMS,
)
from pt2e_quant.backends.xnnpack.passes.recurrent import RECURRENT_ROW
from pt2e_quant.core.schemes import INT8_ACTIVATION, Role
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import (
    ADDS_UNSCALED,
    BATCHED_2D,
    GLOBAL_MEAN,
    LIMITS_ARE_LITERALS,
    POOLS_TO_ONE,
    TENSOR_OPERANDS,
)
from pt2e_quant.graph.op_table import OUT, Constraint, OpKind, OpRow, OpTable, Slot
from pt2e_quant.graph.ops import Overloads, aten
from pt2e_quant.graph.pattern import Many, Op, Var, chain, maybe, one_of
from pt2e_quant.graph.sum_lengths import limit_sums

FUSING = ("add.Tensor", "sub.Tensor", "mul.Tensor")
"""Edge operators whose partitioner setting has to be told that activations fuse."""

X, Y = Var("x"), Var("y")
_IN = Slot(at="x", role=Role.INPUT, accepts=(INT8_ACTIVATION,))
_IN2 = Slot(at="y", role=Role.INPUT, accepts=(INT8_ACTIVATION,))
_OUT = Slot(at=OUT, role=Role.OUTPUT, accepts=(INT8_ACTIVATION,))


def _binary(name: str, overloads: Overloads, lowers_to: str, *needs: Constraint) -> OpRow:
    return OpRow(
        name=name,
        find=chain(Op(overloads, X, Y, name="op"), maybe(CLIPS, "clip")),
        slots=(_IN, _IN2, _OUT),
        constraints=(TENSOR_OPERANDS, LIMITS_ARE_LITERALS, *needs),
        kind=OpKind.LIGHT,
        lowers_to=lowers_to,
        note="a number as operand is stored as an int8 constant; a clip after it is fused",
    )


def _unary(
    name: str,
    overloads: Overloads,
    lowers_to: str,
    *needs: Constraint,
    fixed: tuple[float, int] | None = None,
) -> OpRow:
    out = Slot(at=OUT, role=Role.OUTPUT, accepts=(INT8_ACTIVATION,), fixed=fixed)
    return OpRow(
        name=name,
        find=(Op(overloads, X, name="op"),),
        slots=(_IN, out),
        constraints=needs,
        kind=OpKind.LIGHT,
        lowers_to=lowers_to,
    )


def _pool(
    name: str, overloads: Overloads, lowers_to: str, *needs: Constraint, shares: bool
) -> OpRow:
    return OpRow(
        name=name,
        find=(Op(overloads, X, name="op"),),
        slots=(_IN, _OUT),
        share=(("x", OUT),) if shares else (),
        constraints=needs,
        kind=OpKind.LIGHT,
        lowers_to=lowers_to,
    )


def _moves(
    name: str, overloads: Overloads, lowers_to: str, *needs: Constraint, note: str = ""
) -> OpRow:
    return OpRow(
        name=name,
        find=(Op(overloads, X, name="op"),),
        slots=(_IN, _OUT),
        share=(("x", OUT),),
        constraints=needs,
        lowers_to=lowers_to,
        kind=OpKind.MOVES,
        note=note,
    )


def _join(name: str, overloads: Overloads, lowers_to: str) -> OpRow:
    return OpRow(
        name=name,
        find=(Op(overloads, Many("x"), name="op"),),
        slots=(_IN, _OUT),
        share=(("x", OUT),),
        lowers_to=lowers_to,
        kind=OpKind.MOVES,
    )


_OUTSIDE = "on the integers, outside the delegate"
_BINARIES = (
    _binary("add", ops.ADD, "Add", ADDS_UNSCALED),
    _binary("sub", ops.SUB, "Subtract", ADDS_UNSCALED),
    _binary("mul", ops.MUL, "Multiply"),
    _binary("div", ops.DIV, "Div"),
    _binary("minimum", ops.MINIMUM, "Minimum"),
    _binary("maximum", ops.MAXIMUM, "Maximum"),
)
_UNARIES = (
    _unary("abs", (aten.abs.default,), "Abs"),
    _unary("ceil", (aten.ceil.default,), "Ceiling"),
    _unary("clip", CLIPS, "Clamp"),
    _unary("elu", ops.ELU, "ELU"),
    _unary("exp", (aten.exp.default,), "Exp"),
    _unary("floor", (aten.floor.default,), "Floor"),
    _unary("gelu", ops.GELU, "Gelu", TANH_IS_EXACT),
    _unary("hardswish", ops.HARDSWISH, "Hardswish"),
    _unary("leaky_relu", ops.LEAKY_RELU, "LeakyReLU"),
    _unary("log", (aten.log.default,), "Log"),
    _unary("neg", (aten.neg.default,), "Negate"),
    _unary("sigmoid", ops.SIGMOID, "Sigmoid", fixed=(1 / 256, -128)),
    _unary("sqrt", (aten.sqrt.default,), "SquareRoot"),
    _unary("tanh", ops.TANH, "Tanh", fixed=(1 / 128, 0)),
)
_POOLS = (
    _pool(
        "max_pool2d",
        (aten.max_pool2d.default,),
        "MaxPooling2d",
        STRIDE_FITS_KERNEL,
        NO_CEIL_IF_DYNAMIC,
        shares=True,
    ),
    _pool(
        "adaptive_avg_pool2d",
        ops.ADAPTIVE_AVG_POOL2D,
        "GlobalAvgPooling2d",
        POOLS_TO_ONE,
        BATCHED_2D,
        shares=False,
    ),
    _pool(
        "mean",
        ops.MEAN,
        "GlobalAvgPooling2d",
        BATCHED_2D,
        GLOBAL_MEAN,
        ONE_DYNAMIC_SIZE,
        shares=False,
    ),
    _pool("avg_pool2d", ops.AVG_POOL2D, "DepthwiseConv2d", WINDOW_IS_WHOLE, shares=False),
)
_MOVES = (
    _join("cat", ops.CAT, "Concatenate"),
    _join("stack", ops.STACK, _OUTSIDE),
    _moves(
        "slice", ops.SLICE, "StaticSlice", note=f"of a dynamic length or with a step: {_OUTSIDE}"
    ),
    _moves("select", (aten.select.int,), "StaticSlice, StaticReshape"),
    _moves(
        "reshape",
        one_of(ops.RESHAPE, ops.SQUEEZE, ops.UNSQUEEZE),
        "StaticReshape",
        note=f"two or more dynamic sizes: {_OUTSIDE}",
    ),
    _moves("permute", ops.PERMUTE, "StaticTranspose"),
    _moves("pad", ops.PAD, "StaticConstantPad; StaticSlice, Concatenate", PADS_IN_INTEGERS),
    _moves("expand", ops.EXPAND, _OUTSIDE),
    _moves("flip", (aten.flip.default,), _OUTSIDE),
    _moves("repeat", (aten.repeat.default,), _OUTSIDE),
    *(
        _moves(
            name,
            (shuffle,),
            "StaticReshape, StaticTranspose",
            note=f"two or more dynamic sizes: {_OUTSIDE}",
        )
        for name, shuffle in (
            ("pixel_shuffle", aten.pixel_shuffle.default),
            ("pixel_unshuffle", aten.pixel_unshuffle.default),
            ("channel_shuffle", aten.channel_shuffle.default),
        )
    ),
    _moves(
        "upsample_nearest",
        ops.RESIZE_NEAREST,
        f"rows and pixels {_OUTSIDE}",
        note="a dynamic height or width: element by element",
    ),
    _moves("copy", ops.IDENTITIES, "nothing: it is dropped"),
)
STATIC_ROWS = (*limit_sums(STATIC_GEMMS), *_BINARIES, *_UNARIES, *_POOLS, *_MOVES)
"""Entries that run in integers between static scales."""

TABLE = OpTable(
    backend="XNNPACK",
    rows=(*STATIC_ROWS, *limit_sums(DYNAMIC_GEMMS), *WEIGHT_ONLY_GEMMS, *EMBEDDINGS, RECURRENT_ROW),
    reasons={
        "aten.softmax": "XNNPACK's softmax is float only",
        "aten.matmul": "XNNPACK multiplies two run-time matrices in float only",
        "aten.bmm": "XNNPACK multiplies two run-time matrices in float only",
        "aten.scaled_dot_product_attention": "XNNPACK's attention scores are float only",
        "aten.layer_norm": "the delegate has no layer_norm: ExecuTorch runs it in float",
        "aten.upsample_bilinear2d": "XNNPACK's bilinear resize is float only",
    },
)


def edge_operators() -> frozenset[str]:
    """The table's operators as ExecuTorch's partitioner names them: "sigmoid.default".

    An average pool that is no convolution by then has windows of different sizes: XNNPACK averages
    them in float.
    """
    found = set()
    for row in TABLE:
        for op in row.find:
            for part in op.ops():
                for member in part.members:
                    target = member.target
                    name = getattr(target, "__name__", "")
                    found.add(name.removesuffix("_") if "." not in name else name)
    kept = {"constant_pad_nd.default", "hardtanh.default"}
    return frozenset((found | kept) - {"avg_pool2d.default"})
