"""Layouts of weights as GPU kernels read them: tiles of 4 bits, 2:4 sparse codes, swizzled scales.

cuBLAS, "1D block scaling factors layout": tiles of 128 rows by 4 scales; within a tile, row r and
scale c are at 16 * (r % 32) + 4 * (r // 32) + c. Rows and scales are filled up to whole tiles.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.blocks import grid_shape
from pt2e_quant.core.formats.number_formats import FloatFormat
from pt2e_quant.core.granularity import PerChannel, PerGroup
from pt2e_quant.core.packing import pack, unpack
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.kernels.a8w4_linear.pack import half_of, pack_halves, unpack_halves, weight_sums
from pt2e_quant.kernels.int4_linear.pack import OFFSET, check_group_size, pack_codes, unpack_codes
from pt2e_quant.kernels.sparse_linear.pack import (
    join_fours,
    pack_places,
    split_fours,
    unpack_places,
)
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.layouts.layout import Layout, Parts, code_dtype

_UINT3: torch.dtype = getattr(torch, "uint3")  # noqa: B009  # torch's stubs do not list it
_ROWS, _SCALES = 128, 4
"""The tiles of swizzled scales."""


def group_of(form: TensorForm) -> int:
    """Elements of a row that share a scale; a whole row of one scale each."""
    granularity = form.scheme.granularity
    return granularity.group_size if isinstance(granularity, PerGroup) else form.shape[-1]


def _refusal(form: TensorForm) -> str:
    scheme: TensorScheme = form.scheme
    by_row = scheme.granularity == PerChannel(0)
    if scheme.format is not None or scheme.bits != 4 or len(form.shape) != 2:
        return "a matrix of 4-bit integers is needed"
    if not by_row and not isinstance(scheme.granularity, PerGroup):
        return f"{scheme.granularity} is neither rows nor groups of them"
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    if scheme.scales.dtype not in kinds or scheme.scales.double_group is not None:
        return f"{scheme.scales}"
    try:
        check_group_size(group_of(form), form.shape[1])
    except ConfigError as error:
        return error.what
    return ""


class Int4Tiles(Layout):
    """`tiles` and `tile_scale` of `int4_linear`; zero points as codes, `tile_zero`."""

    name = "int4_tiles"

    def refusal(self, form: TensorForm) -> str:
        """It takes matrices of 4-bit integers by row or in groups."""
        return _refusal(form)

    def pack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """Codes as `int4_linear` reads them."""
        offset = OFFSET if form.scheme.range[0] < 0 else 0
        made = {n: p for n, p in parts.items() if n not in ("codes", "scale", "zero_point")}
        made["tiles"] = pack_codes((parts["codes"].to(torch.int16) + offset).to(torch.uint8))
        made["tile_scale"] = parts["scale"].t().contiguous()
        if "zero_point" in parts:
            zero = (parts["zero_point"].to(torch.int16) + offset).to(torch.uint8)
            made["tile_zero"] = zero.t().contiguous()
        return made

    def unpack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """Tiles as codes."""
        own = ("tiles", "tile_scale", "tile_zero")
        made = {name: part for name, part in parts.items() if name not in own}
        offset = OFFSET if form.scheme.range[0] < 0 else 0
        storage = torch.int8 if offset else torch.uint8
        codes = unpack_codes(parts["tiles"], form.shape[1])
        made["codes"] = (codes.to(torch.int16) - offset).to(storage)
        made["scale"] = parts["tile_scale"].t().contiguous()
        if "tile_zero" in parts:
            zero = parts["tile_zero"].t().to(torch.int16) - offset
            made["zero_point"] = zero.to(storage).contiguous()
        return made


class HalfTiles(Layout):
    """`halves`, `tile_scale` and `tile_sum` of `a8w4_linear`: symmetric weights."""

    name = "a8w4_tiles"

    def refusal(self, form: TensorForm) -> str:
        """It takes symmetric matrices of 4-bit integers by row or in groups."""
        is_signed = form.scheme.symmetric and form.scheme.range[0] < 0
        return _refusal(form) or ("" if is_signed else "zero points are no zeros")

    def pack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """Codes as `a8w4_linear` reads them."""
        made = {n: p for n, p in parts.items() if n not in ("codes", "scale")}
        size, scale = group_of(form), parts["scale"].t().contiguous()
        return made | {
            "halves": pack_halves(parts["codes"], half_of(size, form.shape[1])),
            "tile_scale": scale,
            "tile_sum": weight_sums(parts["codes"], scale, size),
        }

    def unpack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """Tiles as codes."""
        own = ("halves", "tile_scale", "tile_sum")
        made = {name: part for name, part in parts.items() if name not in own}
        made["codes"] = unpack_halves(parts["halves"], form.shape[1])
        made["scale"] = parts["tile_scale"].t().contiguous()
        return made


class SemiSparse(Layout):
    """`values`, half of the codes, and which two of each four neighbours they are.

    On GPUs those are `pairs`, the three bits for each four that `sparse_linear` reads; elsewhere
    `triples`, a byte for three fours. Of `prune_2_4` weights under a symmetric scheme, whose zeros
    are zeros in codes.
    """

    is_of_device = True
    name = "sparse_2_4"

    def refusal(self, form: TensorForm) -> str:
        """It takes matrices of integers with 0 for 0, in rows of fours."""
        scheme = form.scheme
        reasons = (
            (len(form.shape) != 2, "a matrix is needed"),
            (form.shape[-1] % 4 != 0, f"rows of {form.shape[-1]} are no fours of neighbours"),
            (scheme.format is not None, f"{scheme.format} is no integer"),
            (not scheme.symmetric or scheme.range[0] >= 0, "0 is no code of 0"),
            (scheme.bits > 8, "more than 8 bits"),
        )
        return next((text for holds, text in reasons if holds), "")

    def pack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """`codes` as `values` and `pairs` or `triples`.

        Raises:
            ConfigError: four neighbours hold more than two values.
        """
        made = {name: part for name, part in parts.items() if name != "codes"}
        kept, places = split_fours(parts["codes"])
        values = pack(kept, code_dtype(form))
        if values.device.type == "cuda":
            return made | {"values": values, "pairs": pack(places, _UINT3)}
        return made | {"values": values, "triples": pack_places(places)}

    def unpack(self, parts: Mapping[str, Tensor], form: TensorForm) -> Parts:
        """`values` with their places as `codes`."""
        own = ("values", "pairs", "triples")
        made = {name: part for name, part in parts.items() if name not in own}
        N, K = form.shape
        if "pairs" in parts:
            places = unpack(parts["pairs"], _UINT3, (N, K // 4))
        else:
            places = unpack_places(parts["triples"], (N, K // 4))
        kept = unpack(parts["values"], code_dtype(form), (N, K // 2))
        return {"codes": join_fours(kept, places)} | made


def pairs_of(parts: Mapping[str, Tensor], form: TensorForm) -> Tensor:
    """The `pairs` of a semi-sparse tensor, made of `triples` where it holds those."""
    if "pairs" in parts:
        return parts["pairs"]
    N, K = form.shape
    return pack(unpack_places(parts["triples"], (N, K // 4)), _UINT3)


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
