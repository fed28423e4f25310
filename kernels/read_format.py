"""The scheme that a dequantize of our own says: integers on scales of any dtype, small floats."""

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.core.formats.format_ops import is_choose_scales
from pt2e_quant.core.formats.number_formats import float_format
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.core.unpack_op import is_unpack, unpacked_dtype
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.kernels.norm_quantize.op import NormQuantizePerTokenE4m3
from pt2e_quant.kernels.quantize_per_tensor.op import QuantizeTensorE4m3
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRowsE4m3

__all__ = ["scheme_of_blocks", "scheme_of_floats"]

_CHOOSERS = (QuantizeRowsE4m3, NormQuantizePerTokenE4m3, QuantizeTensorE4m3)
"""What gives scales at run time, beside choose_scales."""


def scheme_of_blocks(gm: GraphModule, node: Node) -> TensorScheme | None:
    """Of a `dequantize_block` with constant scales; None for blocks that are no granularity."""
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
    """Of a `dequantize_float`; None for blocks that are no granularity, and for two scales."""
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
    return isinstance(chooser, Node) and chooser.target in _CHOOSERS


def _granularity(block: Sequence[int]) -> Granularity | None:
    """What `core.blocks.block_lengths` made a block of."""
    if all(length == WHOLE for length in block):
        return PerTensor()
    if len(block) > 1 and block[0] == 1 and all(length == WHOLE for length in block[1:]):
        return PerChannel(0)
    if all(length == 1 for length in block[:-1]):
        return PerToken() if block[-1] == WHOLE else PerGroup(block[-1])
    return None
