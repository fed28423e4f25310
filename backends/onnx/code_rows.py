"""Rows for weights in any codes: stored in their few bits, computed with in float.

ONNX Runtime decodes them once, when it loads a file (`rewrites/write_formats.py`).
`tests/backends/onnx/test_every_format.py` lowers and runs each scheme by name.
"""

from itertools import product

from pt2e_quant.backends.onnx.low_bit_rows import GROUP_SIZES
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES, format_scheme_named
from pt2e_quant.core.granularity import PerBlock, PerGroup
from pt2e_quant.core.scheme_names import weight_scheme
from pt2e_quant.core.schemes import Role, TensorScheme
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import OpRow, Slot
from pt2e_quant.graph.pattern import Op, Var

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
            find=(Op(family, Var("x"), Var("w"), Var("b")),),
            slots=(_FLOAT, Slot(at="w", role=Role.WEIGHT, accepts=_KERNELS)),
            lowers_to="Conv",
            note=_NOTE,
        )
        for rank, family in enumerate((ops.CONV1D, ops.CONV2D, ops.CONV3D), start=1)
    ),
    OpRow(
        name="embedding_codes",
        find=(Op(ops.EMBEDDING, Var("w")),),
        slots=(Slot(at="w", role=Role.WEIGHT, accepts=_MATRICES),),
        lowers_to="Gather",
        note=_NOTE,
    ),
)
