"""Op-table entries for tensors stored in few bits, or in 16, and computed in float.

ONNX Runtime decodes codes of weights once, when it loads a file (`rewrites/write_formats.py`).
`tests/backends/onnx/test_every_format.py` lowers and runs each scheme by name.

Its CPU provider quantizes and dequantizes 16 bits (q/dq of opset 21), and runs what only moves
values on the integers; it has no kernel that multiplies them. A product with int8 weights on
16-bit activations is what other devices run (TFLite's 16x8, ExecuTorch's Arm, Qualcomm's HTP), so
the rows are what a graph of integers alone needs, not what is fast.
`tests/backends/onnx/test_sixteen_bit.py` lowers and runs each of them.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import product

import torch
from torch.fx import Node

from pt2e_quant.backends.onnx.low_bit_rows import GROUP_SIZES
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES, format_scheme_named
from pt2e_quant.core.granularity import PerBlock, PerChannel, PerGroup, PerTensor
from pt2e_quant.core.scheme_names import weight_scheme
from pt2e_quant.core.schemes import Role, TensorScheme
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import TENSOR_OPERANDS
from pt2e_quant.graph.op_table import OUT, Constraint, OpKind, OpRow, Slot
from pt2e_quant.graph.ops import Overloads, aten
from pt2e_quant.graph.pattern import Op, Var, one_of

_WIDTHS = (2, 3, 5, 6, 7)
"""Widths that ONNX has no integers of, or ONNX Runtime no kernel for."""

WEIGHT_FORMATS = tuple(name for name, scheme in FORMAT_SCHEMES.items() if scheme.input is None)
"""The schemes by name that quantize weights alone."""


def _formats() -> list[TensorScheme]:
    names = [*WEIGHT_FORMATS, *(f"{n}_g{g}" for n, g in product(WEIGHT_FORMATS, GROUP_SIZES))]
    schemes = [format_scheme_named(name) for name in names]
    return [s.weight for s in schemes if s is not None and s.weight is not None]


def _integers() -> list[TensorScheme]:
    groups = (None, *GROUP_SIZES)
    return [
        weight_scheme(bits, group, symmetric=symmetric)
        for bits, group, symmetric in product(_WIDTHS, groups, (True, False))
    ]


_MATRICES = tuple(dict.fromkeys([*_integers(), *_formats()]))
_INT4 = tuple(weight_scheme(4, symmetric=symmetric) for symmetric in (True, False))
_KERNELS = (
    *(s for s in _MATRICES if not isinstance(s.granularity, PerGroup | PerBlock)),
    *_INT4,
)
"""For convolutions: groups run along the last axis, which there is a kernel's width. Of 4 bits
ONNX Runtime has kernels for matrices alone."""

_FLOAT = Slot(at="x", role=Role.INPUT, accepts=())
_NOTE = "codes of 1 to 8 bits, any scheme by name: in the file as they are, decoded once, at load"

CODE_ROWS = (
    OpRow(
        name="linear_codes",
        find=(Op(ops.LINEAR, Var("x"), Var("w"), Var("b")),),
        slots=(_FLOAT, Slot(at="w", role=Role.WEIGHT, accepts=_MATRICES)),
        lowers_to="MatMul or Gemm",
        note=_NOTE,
    ),
    *(
        OpRow(
            name=f"conv{rank}d_codes",
            find=(Op(overloads, Var("x"), Var("w"), Var("b")),),
            slots=(_FLOAT, Slot(at="w", role=Role.WEIGHT, accepts=_KERNELS)),
            lowers_to="Conv",
            note=_NOTE,
        )
        for rank, overloads in enumerate((ops.CONV1D, ops.CONV2D, ops.CONV3D), start=1)
    ),
    OpRow(
        name="embedding_codes",
        find=(Op(ops.EMBEDDING, Var("w")),),
        slots=(Slot(at="w", role=Role.WEIGHT, accepts=_MATRICES),),
        lowers_to="Gather",
        note=_NOTE,
    ),
)


_INT16, _UINT16 = (
    TensorScheme(dtype=dtype, granularity=PerTensor(), symmetric=False)
    for dtype in (torch.int16, torch.uint16)
)
_EITHER = (_INT16, _UINT16)
_FRACTION = (1 / 32768, 0)
"""Scale and zero point of results in -1 .. 1, as TFLite's 16-bit operators have them."""
_X, _Y, _W, _B = Var("x"), Var("y"), Var("w"), Var("b")


def _has_number(node: Node) -> bool:
    return len(node.args) > 1 and isinstance(node.args[1], int | float)


_BY_A_NUMBER = Op(one_of(ops.ADD, ops.SUB, ops.MUL, ops.DIV), _X, where=_has_number)
_FUNCTIONS: dict[str, tuple[Overloads, str]] = {
    "abs": ((aten.abs.default,), "Abs"),
    "elu": (ops.ELU, "Elu"),
    "exp": ((aten.exp.default,), "Exp"),
    "gelu": (ops.GELU, "Gelu"),
    "group_norm": ((aten.group_norm.default,), "InstanceNormalization"),
    "hardsigmoid": (ops.HARDSIGMOID, "HardSigmoid"),
    "hardswish": (ops.HARDSWISH, "HardSwish"),
    "layer_norm": ((aten.layer_norm.default,), "LayerNormalization"),
    "neg": ((aten.neg.default,), "Neg"),
    "pow": ((aten.pow.Tensor_Scalar,), "Pow"),
    "rms_norm": ((aten.rms_norm.default,), "RMSNormalization"),
    "rsqrt": ((aten.rsqrt.default,), "Sqrt, Reciprocal"),
    "silu": (ops.SILU, "Sigmoid, Mul"),
    "sqrt": ((aten.sqrt.default,), "Sqrt"),
    "upsample_bilinear": ((aten.upsample_bilinear2d.vec,), "Resize"),
}
"""Operators of one tensor whose result has a range of its own."""


def sixteen_bit_rows(
    rows: Iterable[OpRow], integer_limits: Collection[Constraint]
) -> tuple[OpRow, ...]:
    """The rows for 16 bits: those of 8 bits, and what has no integer kernel of 8 bits.

    Args:
        rows: of 8 bits, without limits on the length of sums.
        integer_limits: what ONNX Runtime's integer kernels need and its float ones do not.
    """
    return (
        *(_of_16_bits(row, integer_limits) for row in rows),
        *(
            _row(name, (Op(overloads, _X),), ("x",), to, OpKind.LIGHT)
            for name, (overloads, to) in _FUNCTIONS.items()
        ),
        _fraction("tanh", _INT16, _FRACTION),
        _fraction("tanh_unsigned", _UINT16, None),
        _row("number", (_BY_A_NUMBER,), ("x",), "Add, Sub, Mul or Div", OpKind.LIGHT),
        replace(
            _row("div", (Op(ops.DIV, _X, _Y),), ("x", "y"), "Div", OpKind.LIGHT),
            constraints=(TENSOR_OPERANDS,),
        ),
        *(
            _row(
                f"conv_transpose{rank}d", (Op(overloads, _X, _W, _B),), ("x", "w"), "ConvTranspose"
            )
            for rank, overloads in enumerate(
                (ops.CONV_TRANSPOSE1D, ops.CONV_TRANSPOSE2D, ops.CONV_TRANSPOSE3D), start=1
            )
        ),
    )


def _of_16_bits(row: OpRow, integer_limits: Collection[Constraint]) -> OpRow:
    """A row of 8 bits with 16-bit activations, int8 or int4 weights and a float bias."""
    slots = [_widened(slot) for slot in row.slots if slot.role is not Role.BIAS]
    runs_on_integers = row.kind is OpKind.MOVES and "(uint8)" in row.lowers_to
    float_op = {"sub": "Sub", "sub_clip": "Sub"}.get(row.name, row.lowers_to.replace("QLinear", ""))
    return replace(
        row,
        name=f"{row.name}_16",
        slots=tuple(slots),
        lowers_to=row.lowers_to.replace("uint8", "16 bits") if runs_on_integers else float_op,
        constraints=tuple(c for c in row.constraints if c not in integer_limits),
        note="" if row.kind is OpKind.MOVES else _NOTE_16,
    )


def _row(
    name: str, find: tuple[Op, ...], inputs: tuple[str, ...], to: str, kind: OpKind = OpKind.HEAVY
) -> OpRow:
    roles = {at: Role.WEIGHT if at == "w" else Role.INPUT for at in inputs} | {OUT: Role.OUTPUT}
    slots = tuple(Slot(at=at, role=role, accepts=_accepted(role, 1)) for at, role in roles.items())
    return OpRow(name=f"{name}_16", find=find, slots=slots, lowers_to=to, kind=kind, note=_NOTE_16)


def _fraction(name: str, scheme: TensorScheme, fixed: tuple[float, int] | None) -> OpRow:
    row = _row(name, (Op(ops.TANH, _X),), ("x",), "Tanh", OpKind.LIGHT)
    x, out = (replace(slot, accepts=(scheme,)) for slot in row.slots)
    return replace(row, slots=(x, replace(out, fixed=fixed)))


def _widened(slot: Slot) -> Slot:
    axes = [s.granularity.axis for s in slot.accepts if isinstance(s.granularity, PerChannel)]
    accepts = _accepted(slot.role, axes[0] if axes else 0)
    return replace(slot, accepts=accepts, fixed=None if slot.fixed is None else _FRACTION)


def _accepted(role: Role, axis: int) -> tuple[TensorScheme, ...]:
    if role is not Role.WEIGHT:
        return _EITHER
    schemes = (weight_scheme(bits, by_integers=True) for bits in (8, 4))
    return tuple(replace(scheme, granularity=PerChannel(axis=axis)) for scheme in schemes)


_NOTE_16 = "in float, between DequantizeLinear and QuantizeLinear"
