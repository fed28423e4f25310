"""The scheme that a tensor of a canonical graph has, read from its dequantize."""

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.core.formats.format_ops import is_choose_scales
from pt2e_quant.core.formats.number_formats import float_format
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.granularity import (
    Granularity,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
)
from pt2e_quant.core.qdq import (
    STATIC_KINDS,
    ChoosePerToken,
    QdqKind,
    is_dequantize,
    kind_of_qdq,
    read_qparams,
)
from pt2e_quant.core.schemes import Role, TensorScheme
from pt2e_quant.core.unpack_op import is_unpack, unpacked_dtype
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.op_table import OpRow, Slot
from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.norm_quantize.op import NormQuantizePerToken, NormQuantizePerTokenE4m3
from pt2e_quant.kernels.quantize_per_tensor.op import QuantizeTensor, QuantizeTensorE4m3
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRows, QuantizeRowsE4m3

_CHOOSERS: dict[QdqKind, tuple[Granularity, tuple[object, ...]]] = {
    QdqKind.PER_TOKEN: (PerToken(), (ChoosePerToken, QuantizeRows, NormQuantizePerToken)),
    # Of torch's own operators, whose scales no kernel reads, a linear takes the floats behind.
    QdqKind.PER_TENSOR_DYNAMIC: (PerTensor(), (QuantizeTensor,)),
}
"""Operators that choose the scales of rows, or of a tensor, at run time."""


def scheme_of(gm: GraphModule, node: object) -> TensorScheme | None:
    """The scheme of a dequantized tensor; None for other nodes, and for code books.

    A 4-bit weight has the dtype that its bytes are packed as.
    """
    if not isinstance(node, Node) or not is_dequantize(node):
        return None
    kind = kind_of_qdq(node)
    if kind in _CHOOSERS:
        return _chosen_at_run_time(node, *_CHOOSERS[kind])
    if kind is QdqKind.BLOCK:
        return scheme_of_blocks(gm, node)
    if kind is QdqKind.FLOAT:
        return scheme_of_floats(node)
    if kind not in STATIC_KINDS:
        return None
    qparams = read_qparams(gm, node)
    granularity: Granularity = PerTensor()
    if kind is QdqKind.PER_CHANNEL:
        assert qparams.axis is not None
        granularity = PerChannel(qparams.axis)
    elif kind is QdqKind.PER_CHANNEL_GROUP:
        assert qparams.group_size is not None
        granularity = PerGroup(qparams.group_size)
    source = node.args[0]
    packed = isinstance(source, Node) and is_unpack(source)
    dtype = unpacked_dtype(source) if packed else qparams.dtype  # type: ignore[arg-type]  # a Node
    return TensorScheme(
        dtype=dtype,
        granularity=granularity,
        symmetric=not dtype.is_floating_point and not bool(qparams.zero_point.any()),
        quant_min=qparams.quant_min,
        quant_max=qparams.quant_max,
    )


def _chosen_at_run_time(
    node: Node, granularity: Granularity, choosers: tuple[object, ...]
) -> TensorScheme | None:
    scale, low, high, dtype = (node.args[i] for i in (1, 3, 4, 5))
    chooser = scale.args[0] if isinstance(scale, Node) and scale.args else None
    if not isinstance(chooser, Node) or chooser.target not in choosers:
        return None
    assert isinstance(dtype, torch.dtype)
    return TensorScheme(
        dtype=dtype,
        granularity=granularity,
        symmetric=False,
        quant_min=int(low),  # type: ignore[arg-type]  # literals by schema
        quant_max=int(high),  # type: ignore[arg-type]
        is_dynamic=True,
    )


def slots_fit(gm: GraphModule, row: OpRow, match: Match) -> bool:
    """True if every tensor that goes into a match has a scheme that its slot accepts.

    A slot that may be float takes a float tensor too; results are judged by what reads them.
    """
    return all(
        _fits(scheme_of(gm, node), slot)
        for slot in row.slots
        if slot.role is not Role.OUTPUT
        for node in _tensors(match, slot.at)
    )


def _tensors(match: Match, at: str) -> tuple[object, ...]:
    value = match[at]
    return value if isinstance(value, tuple) else (value,)


def _fits(found: TensorScheme | None, slot: Slot) -> bool:
    if found is None:
        return slot.is_optional or not slot.accepts
    return any(found.fits(accepted) for accepted in slot.accepts)


_SCALE_CHOOSERS = (QuantizeRowsE4m3, NormQuantizePerTokenE4m3, QuantizeTensorE4m3)
"""Operators that choose scales at run time, beside choose_scales."""


def scheme_of_blocks(gm: GraphModule, node: Node) -> TensorScheme | None:
    """The scheme of a `dequantize_block` with constant scales; None for other blocks."""
    codes, scales, zero_points, block, low, high, dtype = node.args[:7]
    granularity = _granularity(block)  # type: ignore[arg-type]  # literals by schema
    if granularity is None or not isinstance(scales, Node) or scales.op != "get_attr":
        return None
    packed = isinstance(codes, Node) and is_unpack(codes)
    kind = unpacked_dtype(codes) if packed else dtype  # type: ignore[arg-type]  # a Node
    assert isinstance(kind, torch.dtype)
    zeros = constant_of(gm, zero_points) if isinstance(zero_points, Node) else None
    return TensorScheme(
        dtype=kind,
        granularity=granularity,
        symmetric=info(kind).signed and (zeros is None or not bool(zeros.any())),
        quant_min=int(low),  # type: ignore[arg-type]  # literals by schema
        quant_max=int(high),  # type: ignore[arg-type]
        scales=ScaleFormat(dtype=scales.meta["val"].dtype),
    )


def scheme_of_floats(node: Node) -> TensorScheme | None:
    """The scheme of a `dequantize_float`; None for other blocks, and for two scales."""
    _, scales, tensor_scale, block, name = node.args[:5]
    granularity = _granularity(block)  # type: ignore[arg-type]  # literals by schema
    if granularity is None or tensor_scale is not None or not isinstance(scales, Node):
        return None
    is_dynamic = is_choose_scales(scales) or _is_chosen(scales)
    if not is_dynamic and scales.op != "get_attr":
        return None
    if isinstance(granularity, PerChannel) and is_dynamic:
        # A row of two dimensions is a token as well as a channel.
        granularity = PerToken()
    form = float_format(str(name))
    return TensorScheme(
        dtype=form.code_dtype,
        granularity=granularity,
        symmetric=True,
        is_dynamic=is_dynamic,
        format=form,
        scales=ScaleFormat(dtype=scales.meta["val"].dtype),
    )


def _is_chosen(scales: Node) -> bool:
    chooser = scales.args[0] if scales.args else None
    return isinstance(chooser, Node) and chooser.target in _SCALE_CHOOSERS


def _granularity(block: Sequence[int]) -> Granularity | None:
    """The granularity that `core.blocks.block_lengths` made a block of."""
    if all(length == WHOLE for length in block):
        return PerTensor()
    if len(block) > 1 and block[0] == 1 and all(length == WHOLE for length in block[1:]):
        return PerChannel(0)
    if all(length == 1 for length in block[:-1]):
        return PerToken() if block[-1] == WHOLE else PerGroup(block[-1])
    return None
