"""Choosing scales of rows and quantizing to 8-bit floats become one launch that readers share."""

import torch
from torch import nn

from pt2e_quant.core.formats.format_ops import ChooseScales, DequantizeFloat, QuantizeFloat
from pt2e_quant.kernels.quantize_per_token.fuse_choose import fuse_choose_e4m3
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRowsE4m3
from pt2e_quant.kernels.read_scheme import scheme_of


def through(x, block=(1, 1, -1), name="float8_e4m3fn", limit=448.0):
    """x through the q/dq of one dynamic reader."""
    block = list(block)
    scale = ChooseScales(x, None, block, limit, torch.float32)
    codes = QuantizeFloat(x, scale, None, block, name)
    return DequantizeFloat(codes, scale, None, block, name, out_dtype=x.dtype)


class ThreeReaders(nn.Module):
    def forward(self, x):
        h = x * 2.0
        return through(h) + 1.0, through(h) * 2.0, through(h)


class WrittenBetween(nn.Module):
    def forward(self, x):
        h = x * 2.0
        first = through(h)
        h.add_(1.0)
        return first, through(h)


class OtherFormats(nn.Module):
    def forward(self, x):
        whole = through(x, (-1, -1, -1))
        blocks = through(x, (1, 1, 11))
        return whole, blocks, through(x, name="float8_e5m2", limit=57344.0)


class ReadScale(nn.Module):
    def forward(self, x):
        scale = ChooseScales(x, None, [1, 1, -1], 448.0, torch.float32)
        return QuantizeFloat(x, scale, None, [1, 1, -1], "float8_e4m3fn").float(), scale


def fused(model, dtype=torch.float32):
    x = torch.randn(2, 5, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    gm = torch.export.export(model, (x,)).module(check_guards=False)
    wanted = gm(x)
    result = fuse_choose_e4m3(gm)
    for ours, theirs in zip(gm(x), wanted, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)
    return gm, result


def calls(gm, target):
    return [n for n in gm.graph.nodes if n.target is target]


def test_fuse_choose_e4m3_when_three_readers_are_alike_then_share_one_launch_to_the_last_bit():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        gm, result = fused(ThreeReaders(), dtype)
        assert result.changed
        assert len(calls(gm, QuantizeRowsE4m3)) == 1
        assert not calls(gm, ChooseScales)
        assert not calls(gm, QuantizeFloat)
        scheme = scheme_of(gm, calls(gm, DequantizeFloat)[0])
        assert scheme.is_dynamic
        assert str(scheme.format) == "float8_e4m3fn"
        assert not fuse_choose_e4m3(gm).changed


def test_fuse_choose_e4m3_when_written_in_between_then_quantizes_again():
    gm, _ = fused(WrittenBetween())
    assert len(calls(gm, QuantizeRowsE4m3)) == 2


def test_fuse_choose_e4m3_when_blocks_or_formats_are_others_then_stays():
    gm, result = fused(OtherFormats())
    assert not result.changed
    assert len(calls(gm, ChooseScales)) == 3


def test_fuse_choose_e4m3_when_others_read_the_scales_then_stays():
    _, result = fused(ReadScale())
    assert not result.changed
    assert "read by others" in result.notes[0].text
