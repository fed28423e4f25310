"""A quantize to 8-bit floats that no kernel took becomes one launch."""

import torch
from torch import nn

from pt2e_quant.core.formats.format_ops import DequantizeFloat, QuantizeFloat
from pt2e_quant.kernels.quantize.op import Quantize, fuse_lone_e4m3
from tests.kernels.e4m3_values import hard_values, same_codes


class Quantized(nn.Module):
    def __init__(self, scale, block, name="float8_e4m3fn"):
        super().__init__()
        self.block, self.name = block, name
        self.register_buffer("scale", scale)

    def forward(self, x):
        codes = QuantizeFloat(x, self.scale, None, self.block, self.name)
        return codes, DequantizeFloat(codes, self.scale, None, self.block, self.name)


def fused(model, x):
    gm = torch.export.export(model, (x,)).module(check_guards=False)
    wanted = model(x)
    result = fuse_lone_e4m3(gm)
    codes, real = gm(x)
    torch.testing.assert_close(real, wanted[1], rtol=0, atol=0, equal_nan=True)
    if codes.dtype is torch.float8_e4m3fn:
        assert same_codes(codes, wanted[0])
    return [n for n in gm.graph.nodes if n.target is Quantize], result


def test_fuse_lone_qdq_when_the_scale_is_constant_then_is_one_launch_to_the_last_bit():
    x = hard_values().reshape(2, -1)
    for scale in (1.0, 0.3, 1e-5):
        for dtype in (torch.float32, torch.bfloat16):
            made, result = fused(Quantized(torch.full((1, 1), scale), [-1, -1]), x.to(dtype))
            assert result.changed
            assert len(made) == 1


def test_fuse_lone_qdq_when_blocks_or_formats_are_others_then_stays():
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    rows = Quantized(torch.full((2, 1), 0.1), [1, -1])
    wide = Quantized(torch.full((1, 1), 0.1), [-1, -1], "float6_e2m3fn")
    for model in (rows, wide):
        made, result = fused(model, x)
        assert not made
        assert not result.changed
