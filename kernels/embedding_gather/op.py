"""The operator `pt2e_quant::embedding_gather`, and where a graph calls it."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.granularity import Granularity, PerChannel, PerGroup
from pt2e_quant.core.schemes import Role, TensorScheme
from pt2e_quant.core.unpack_op import is_unpack
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import Constraint, OpRow, Slot
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.embedding_gather import reference
from pt2e_quant.kernels.epilogue.epilogue import OUTPUT_SCHEMA
from pt2e_quant.kernels.epilogue.read_graph import output_arguments
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.grouped_weight import read_grouped_weight
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.shape_classes import by_columns
from pt2e_quant.kernels.site import Site


def _fake(
    table: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    indices: Tensor,
    columns: int,
    bits: int = 8,
    is_signed: bool = True,
    *,
    out_dtype: torch.dtype = torch.float32,
    **named: Any,
) -> Tensor:
    return scale.new_empty((*indices.shape, columns), dtype=out_dtype)


EmbeddingGather = define(
    "embedding_gather(Tensor table, Tensor scale, Tensor? zero_point, Tensor indices, "
    f"int columns, int bits=8, bool is_signed=True, *, {OUTPUT_SCHEMA}, "
    'str label="") -> Tensor',
    reference=reference.embedding_gather,
    triton=triton_kernel("pt2e_quant.kernels.embedding_gather.gpu", "embedding_gather"),
    fake=_fake,
)
"""y[..., k] = (table[index, k] - zero_point) * scale, of the index's row and k's group.

    table: int8 or uint8[V, K]; for 4 bits uint8[V, ceil(K / 2)] in the format of `core.packing`.
    scale: a float dtype[V, K / G]; zero_point: int32[V, K / G], None where all are 0.
    indices: int64 or int32 of any shape.
    columns: K.
    is_signed: whether 4-bit codes are two's complement.
    out_dtype: a float dtype, or int8 or uint8 with the qparams out_scale and so on.
    label: the node, for the profiler.

An index outside of the table is an IndexError on the CPU, and on a GPU a row of NaN, or of
zeros where the result is integers.
"""


def cost(table: Tensor, scale: Tensor, indices: Tensor, out: Tensor) -> Cost:
    """Bytes and operations of one call: of the table only the rows that are looked up."""
    row = table.shape[1] * table.element_size() + scale.shape[1] * scale.element_size()
    return Cost(bytes=moved_bytes(indices, out) + indices.numel() * row, operations=2 * out.numel())


_INT4, _UINT4 = (getattr(torch, name) for name in ("int4", "uint4"))  # torch's stubs list neither
_LAYOUTS: tuple[Granularity, ...] = (
    PerChannel(0),
    *(PerGroup(size) for size in (16, 32, 64, 128, 256)),
)
_TABLES = tuple(
    TensorScheme(dtype=dtype, granularity=granularity, symmetric=False)
    for dtype in (torch.int8, _INT4, _UINT4)
    for granularity in _LAYOUTS
)


def _is_plain_lookup(match: Match) -> bool:
    value = match["i"].meta.get("val") if isinstance(match["i"], Node) else None
    return value is not None and value.dtype in (torch.int64, torch.int32)


PLAIN_LOOKUP = Constraint(text="indices in int64 or int32", holds=_is_plain_lookup)


def build(site: Site) -> Node:
    """`embedding_gather` on the table as it is stored: bytes, or packed 4-bit codes."""
    dequantize = site.match.node("w")
    found = read_grouped_weight(site.gm, dequantize)
    assert found is not None  # the row's scheme says so
    table: Any = dequantize.args[0]
    bits = 8
    if is_unpack(table):
        table, bits = table.args[0], int(table.args[1])
    zero_point = found.zero_point
    return site.call(
        EmbeddingGather,
        site.editor.now(table),
        site.constant("table_scale", found.scale.contiguous()),
        None if zero_point is None else site.constant("table_zero_point", zero_point.contiguous()),
        site.editor.now(site.match.node("i")),
        found.integers.shape[1],
        bits,
        found.integers.dtype is torch.int8,
        **output_arguments(site),
    )


def node_cost(node: Node) -> Cost:
    """The cost of a fused call in a graph."""
    table, scale, indices = (node.args[i].meta["val"] for i in (0, 1, 3))  # type: ignore[union-attr]  # nodes by construction
    return cost(table, scale, indices, node.meta["val"])


KERNELS = (
    Kernel(
        row=OpRow(
            name="embedding",
            find=(Op(ops.EMBEDDING, Var("w"), Var("i"), name="op"),),
            slots=(Slot(at="w", role=Role.WEIGHT, accepts=_TABLES),),
            constraints=(PLAIN_LOOKUP,),
            lowers_to="pt2e_quant::embedding_gather",
            note="rows are dequantized as they are read; the result may be int8",
        ),
        device=Device.CUDA,
        op="embedding_gather",
        build=build,
        shape_class=by_columns,
        cost=node_cost,
    ),
)
