"""Scales of MX and NVFP4 in the order that NVIDIA's block-scaled products read them.

cuBLAS, "1D block scaling factors layout": tiles of 128 rows by 4 scales; within a tile, row r and
scale c are at 16 * (r % 32) + 4 * (r // 32) + c. Rows and scales are filled up to whole tiles.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pt2e_quant.core.formats.blocks import grid_shape
from pt2e_quant.core.formats.number_formats import FloatFormat
from pt2e_quant.core.granularity import PerGroup
from pt2e_quant.core.packing import pack, unpack
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.layouts.layout import Layout, Parts, code_dtype

_ROWS, _SCALES = 128, 4


def swizzle(scale: Tensor) -> Tensor:
    """Scales of one byte [rows, groups] as tiles: uint8[tiles of rows, tiles of groups, 32, 16]."""
    rows, groups = scale.shape
    tall, wide = -(-rows // _ROWS), -(-groups // _SCALES)
    bytes_ = scale.contiguous().view(torch.uint8)
    padding = (0, wide * _SCALES - groups, 0, tall * _ROWS - rows)
    padded = torch.nn.functional.pad(bytes_, padding)
    tiles = padded.view(tall, 4, 32, wide, _SCALES).permute(0, 3, 2, 1, 4)
    return tiles.reshape(tall, wide, 32, 16).contiguous()


def unswizzle(tiles: Tensor, rows: int, groups: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `swizzle`."""
    tall, wide = tiles.shape[:2]
    padded = tiles.view(tall, wide, 32, 4, _SCALES).permute(0, 3, 2, 1, 4)
    flat = padded.reshape(tall * _ROWS, wide * _SCALES)
    return flat[:rows, :groups].contiguous().view(dtype)


class SwizzledScales(Layout):
    """`swizzled` scales; codes of 4 and 6 bits as `packed`, of 8 as they are."""

    name = "mx_swizzled"

    def refusal(self, form: TensorForm) -> str:
        """It takes matrices of small floats in groups along rows, with scales of one byte."""
        scheme = form.scheme
        reasons = (
            (len(form.shape) != 2, "a matrix is needed"),
            (not isinstance(scheme.format, FloatFormat), "a small float is needed"),
            (not isinstance(scheme.granularity, PerGroup), "groups are needed"),
            (scheme.scales.dtype.itemsize != 1, f"{scheme.scales} are no bytes"),
        )
        return next((text for holds, text in reasons if holds), "")

    def pack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """`scale` as `swizzled`."""
        made = {name: part for name, part in parts.items() if name not in ("codes", "scale")}
        is_byte = form.scheme.bits == 8
        codes = parts["codes"] if is_byte else pack(parts["codes"], code_dtype(form))
        return {"packed": codes} | made | {"swizzled": swizzle(parts["scale"])}

    def unpack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """`swizzled` as `scale`."""
        made = {name: part for name, part in parts.items() if name not in ("packed", "swizzled")}
        packed = parts["packed"]
        if form.scheme.bits < 8:
            packed = unpack(packed, code_dtype(form), form.shape)
        rows, groups = grid_shape(form.shape, form.block)
        dtype = form.scheme.scales.dtype
        scale = unswizzle(parts["swizzled"], rows, groups, dtype)
        return {"codes": packed, "scale": scale} | made
