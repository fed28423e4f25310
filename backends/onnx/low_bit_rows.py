"""Op-table entries of weight-only and dynamic schemes: computed in integers, or only stored so.

`tests/backends/onnx/test_low_bit.py` lowers and runs each; `docs/onnx_runtime.md` has the times
that decided.
"""

from itertools import product

import torch

from pt2e_quant.core.granularity import PerTensor, PerToken
from pt2e_quant.core.scheme_names import weight_scheme
from pt2e_quant.core.schemes import INT8_WEIGHT, Role, TensorScheme
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import OpRow, Slot
from pt2e_quant.graph.pattern import Op, Var

GROUP_SIZES = (16, 32, 64, 128, 256)
"""The blocks that MatMulNBits and GatherBlockQuantized take."""


def _weights(bits: int, *groups: int | None) -> Slot:
    accepts = tuple(
        weight_scheme(bits, group, symmetric=symmetric)
        for symmetric, group in product((False, True), groups)
    )
    return Slot(at="w", role=Role.WEIGHT, accepts=accepts)


def _dynamic(granularity: PerTensor | PerToken, *dtypes: torch.dtype) -> Slot:
    accepts = tuple(
        TensorScheme(dtype=dtype, granularity=granularity, symmetric=False, is_dynamic=True)
        for dtype in dtypes
    )
    return Slot(at="x", role=Role.INPUT, accepts=accepts)


_FLOAT = Slot(at="x", role=Role.INPUT, accepts=())
_FOUR_BIT = _weights(4, None, *GROUP_SIZES)
_EIGHT_BIT = _weights(8, None, *GROUP_SIZES)
_INT8 = Slot(at="w", role=Role.WEIGHT, accepts=(INT8_WEIGHT,))
_PER_TOKEN = _dynamic(PerToken(), torch.int8)
_LINEAR = (Op(ops.LINEAR, Var("x"), Var("w"), Var("b")),)
_EMBEDDING = (Op(ops.EMBEDDING, Var("w")),)
_AT_LOAD = "the weight is int8 in the file and dequantized once, when the file is loaded"

LOW_BIT_ROWS = (
    OpRow(
        name="linear_w4",
        find=_LINEAR,
        slots=(_FLOAT, _FOUR_BIT),
        lowers_to="MatMulNBits (4 bits, accuracy_level 0)",
        note="computed in float32; groups of 16, 32, 64, 128, 256, or a scale a channel",
    ),
    OpRow(
        name="linear_w8",
        find=_LINEAR,
        slots=(_FLOAT, _EIGHT_BIT),
        lowers_to="MatMul or Gemm",
        note=_AT_LOAD,
    ),
    *(
        OpRow(
            name=f"{name}{rank}d_w8",
            find=(Op(overloads, Var("x"), Var("w"), Var("b")),),
            slots=(_FLOAT, _weights(8, None)),
            lowers_to=lowers_to,
            note=_AT_LOAD,
        )
        for name, lowers_to, ranks in (
            ("conv", "Conv", (ops.CONV1D, ops.CONV2D, ops.CONV3D)),
            (
                "conv_transpose",
                "ConvTranspose",
                (ops.CONV_TRANSPOSE1D, ops.CONV_TRANSPOSE2D, ops.CONV_TRANSPOSE3D),
            ),
        )
        for rank, overloads in enumerate(ranks, start=1)
    ),
    OpRow(
        name="linear_a8w4",
        find=_LINEAR,
        slots=(_PER_TOKEN, _FOUR_BIT),
        lowers_to="MatMulNBits (4 bits, accuracy_level 4)",
        note="the kernel rounds activations to int8 itself, with a scale for each group of a "
        "token: closer to float than the one scale a token of the graph",
    ),
    OpRow(
        name="linear_a8w8",
        find=_LINEAR,
        slots=(_PER_TOKEN, _INT8),
        lowers_to="QuantizeLinear by rows, MatMulIntegerToFloat",
    ),
    OpRow(
        name="linear_a8w8_per_tensor",
        find=_LINEAR,
        slots=(_dynamic(PerTensor(), torch.int8, torch.uint8), _INT8),
        lowers_to="DynamicQuantizeMatMul, or MatMulIntegerToFloat where several read one input",
        note="uint8 at run time, whichever the scheme says: the reals are the same",
    ),
    OpRow(
        name="embedding_w4",
        find=_EMBEDDING,
        slots=(_FOUR_BIT,),
        lowers_to="GatherBlockQuantized (4 bits)",
    ),
    OpRow(
        name="embedding_w8",
        find=_EMBEDDING,
        slots=(_weights(8, *GROUP_SIZES),),
        lowers_to="GatherBlockQuantized (8 bits)",
    ),
)
