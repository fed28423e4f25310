"""Choosing and quantizing per token become one launch that all readers share."""

import torch
from torch import nn

from pt2e_quant.core.qdq import ChoosePerToken, DequantizePerToken, QuantizePerToken
from pt2e_quant.kernels.quantize_per_token.fuse_choose import fuse_choose_quantize
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRows
from pt2e_quant.kernels.read_scheme import scheme_of


def through(x, dtype=torch.int8):
    """x through the q/dq of one dynamic reader."""
    scale, zero_point = ChoosePerToken(x, dtype)
    integers = QuantizePerToken(x, scale, zero_point, -128, 127, dtype)
    return DequantizePerToken(integers, scale, zero_point, -128, 127, dtype, x.dtype)


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


class ReadScale(nn.Module):
    def forward(self, x):
        scale, zero_point = ChoosePerToken(x, torch.int8)
        integers = QuantizePerToken(x, scale, zero_point, -128, 127, torch.int8)
        made = DequantizePerToken(integers, scale, zero_point, -128, 127, torch.int8, x.dtype)
        return made, scale


def fused(model, x):
    gm = torch.export.export(model, (x,)).module(check_guards=False)
    wanted = gm(x)
    result = fuse_choose_quantize(gm)
    for ours, theirs in zip(gm(x), wanted, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)
    return gm, result


def calls(gm, target):
    return [n for n in gm.graph.nodes if n.target is target]


def test_fuse_choose_quantize_when_three_readers_are_alike_then_share_one_launch_to_the_last_bit():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x = torch.randn(2, 5, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
        gm, result = fused(ThreeReaders(), x)
        assert result.changed
        assert len(calls(gm, QuantizeRows)) == 1
        assert not calls(gm, ChoosePerToken)
        assert not calls(gm, QuantizePerToken)
        dequantizes = calls(gm, DequantizePerToken)
        assert {str(scheme_of(gm, n)) for n in dequantizes} == {
            "int8[-128, 127] affine dynamic PerToken()"
        }


def test_fuse_choose_quantize_when_run_again_then_changes_nothing():
    gm, _ = fused(ThreeReaders(), torch.ones(2, 3))
    assert not fuse_choose_quantize(gm).changed


def test_fuse_choose_quantize_when_written_in_between_then_keeps_the_launches_apart():
    gm, _ = fused(WrittenBetween(), torch.randn(4, 9, generator=torch.Generator().manual_seed(0)))
    assert len(calls(gm, QuantizeRows)) == 2


def test_fuse_choose_quantize_when_others_read_the_qparams_then_stays():
    gm, result = fused(ReadScale(), torch.ones(2, 3))
    assert not result.changed
    assert [note.text for note in result.notes] == ["its qparams are read by others too"]
    assert len(calls(gm, ChoosePerToken)) == 1
