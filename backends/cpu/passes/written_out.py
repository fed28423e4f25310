"""Operators that run in Python, in torch's own, which a compiler fuses and a file can call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node

from pt2e_quant.core.cache_ops import PackRows, UnpackRows
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.formats.format_ops import DECOMPOSITIONS
from pt2e_quant.kernels.int4_linear.any_rows_op import LinearOfGroups, linear_of_groups
from pt2e_quant.kernels.int4_linear.few_rows_op import LinearOfInt4, linear_of_int4
from pt2e_quant.kernels.int8_linear import multiply_cpu, reference, rows_op
from pt2e_quant.kernels.int8_linear.op import Int8Linear
from pt2e_quant.kernels.int8_linear.rows_op import Int8LinearRows
from pt2e_quant.kernels.onednn.limbs_op import LinearOfLimbs, linear_of_limbs
from pt2e_quant.kernels.onednn.operators import ConvSum, LinearSum
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRows
from pt2e_quant.kernels.quantize_per_token.reference import quantize_per_token


def write_out(program: ExportedProgram, buffers: Sequence[str] = ()) -> ExportedProgram:
    """Write out the operators of this package that a compiled program would call in Python.

    A call into Python needs this package wherever the file is loaded, and torch's ahead-of-time
    compiler gets some of its dtypes wrong: one left to its default is written as an integer, which
    the loader of torch 2.13 refuses; that of torch 2.11 reads those that are given as others.

    Before:  quantize_per_token(x), int8_linear_rows(x_q, scale, zero_point, packed, …)
    After:   amin(x), amax(x), …, qlinear_pointwise(…), sub, mul, …

    Operators on constants alone stay: a compiler that freezes folds them. A program without such
    operators and without buffers that it writes is given back as it is.

    Args:
        program: what is to be compiled.
        buffers: dotted names of those that a call writes.

    Raises:
        UnsupportedError: an operator of this package on what varies has no form in torch's own; or
            a value is made of written buffers and constants alone, which freezing takes for one.
    """
    table = _table()
    has_any = bool(buffers) or any(node.target in table for node in program.graph.nodes)
    written: ExportedProgram = program.run_decompositions(table) if has_any else program
    frozen = _frozen_state(written)
    if frozen is not None:
        raise UnsupportedError(
            f"{frozen.target} reads a buffer that calls write and no input, and a compiled program "
            "would keep what it gave at first",
            node=frozen,
            fix="run the artifact as it is, or pass that buffer as an input and a result",
        )
    left = _left(written)
    if left is not None:
        raise UnsupportedError(
            f"{left.target} has no form in torch's own operators, which a compiled program is "
            "made of",
            node=left,
            fix="run the artifact as it is, or leave this part float",
        )
    return written


def _table() -> dict[Any, Callable[..., Any]]:
    is_exact = multiply_cpu.int_mm_is_exact()
    return {
        **DECOMPOSITIONS,
        Int8Linear: multiply_cpu.written_out if is_exact else reference.int8_linear,
        Int8LinearRows: rows_op.written_out,
        LinearOfLimbs: linear_of_limbs,
        LinearOfGroups: linear_of_groups,
        LinearOfInt4: linear_of_int4,
        PackRows: _pack_rows,
        QuantizeRows: quantize_per_token,
        UnpackRows: _unpack_rows,
    }


def _shifts(bits: int) -> Tensor:
    if 8 % bits:
        raise UnsupportedError(f"rows of {bits} bits are not compiled", fix="use 4 bits, or 8")
    return torch.arange(0, 8, bits, dtype=torch.uint8)


def _pack_rows(values: Tensor, bits: int, is_signed: bool) -> Tensor:
    """`cache_ops.pack_rows` of values that fit: a tracer cannot look."""
    shifts = _shifts(bits)
    codes = values.to(torch.uint8) & ((1 << bits) - 1)
    places = codes.reshape(*codes.shape[:-1], -1, len(shifts)) << shifts
    packed: Tensor = places.sum(-1, dtype=torch.uint8)
    return packed


def _unpack_rows(packed: Tensor, bits: int, is_signed: bool) -> Tensor:
    """`cache_ops.unpack_rows`."""
    codes = (packed.unsqueeze(-1) >> _shifts(bits)) & ((1 << bits) - 1)
    codes = codes.flatten(-2)
    if not is_signed:
        return codes
    sign = 1 << (bits - 1)
    return (codes ^ sign).to(torch.int8) - sign


def _reached(program: ExportedProgram, *, inputs: bool, state: bool) -> set[Node]:
    """What depends on the call's inputs, or on buffers that a call writes."""
    signature = program.graph_signature
    written = {*signature.buffers_to_mutate.values()}
    names = {
        spec.arg.name
        for spec in signature.input_specs
        if (inputs and spec.kind is InputKind.USER_INPUT) or (state and spec.target in written)
    }
    found: set[Node] = set()
    for node in program.graph.nodes:
        if node.name in names or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _frozen_state(program: ExportedProgram) -> Node | None:
    """The first value that is made of written buffers and of no input."""
    varying = _reached(program, inputs=True, state=False)
    state = _reached(program, inputs=False, state=True)
    return next(
        (n for n in program.graph.nodes if n.op == "call_function" and n in state - varying), None
    )


def _left(program: ExportedProgram) -> Node | None:
    """The first operator of this package that runs in Python in every call."""
    varying = _reached(program, inputs=True, state=True)
    for node in program.graph.nodes:
        is_own = getattr(node.target, "namespace", "") == "pt2e_quant"
        if is_own and node in varying and node.target not in (ConvSum, LinearSum):
            found: Node = node
            return found
    return None
