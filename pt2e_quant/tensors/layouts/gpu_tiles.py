"""4-bit weights in the tiles that the Triton kernels of `kernels/` read."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.granularity import PerChannel, PerGroup
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.kernels.a8w4_linear.pack import (
    half_of,
    pack_halves,
    unpack_halves,
    weight_sums,
)
from pt2e_quant.kernels.int4_linear.pack import (
    OFFSET,
    check_group_size,
    pack_codes,
    unpack_codes,
)
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.layouts.layout import Layout, Parts


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
