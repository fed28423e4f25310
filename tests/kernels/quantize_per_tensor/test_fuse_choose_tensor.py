"""Choosing and quantizing a whole tensor become one call that all readers share."""

import pytest
import torch
from torch import nn

from pt2e_quant.core.formats.format_ops import ChooseScales, DequantizeFloat, QuantizeFloat
from pt2e_quant.core.qdq import (
    ChoosePerTensor,
    ChoosePerTensorSymmetric,
    DequantizePerTensorDynamic,
    QuantizePerTensorDynamic,
)
from pt2e_quant.kernels.quantize_per_token.fuse_choose import (
    fuse_choose_tensor,
    fuse_choose_tensor_e4m3,
)
from pt2e_quant.kernels.read_scheme import scheme_of
from tests.kernels.lowering import calls_of, captured


def through(x, choose=ChoosePerTensor, dtype=torch.int8, low=-128, high=127):
    """x through the q/dq of one dynamic reader."""
    limits = (0, 255) if dtype is torch.uint8 else (low, high)
    chosen = (0, 255) if dtype is torch.uint8 else (-128, 127)
    scale, zero_point = choose(x, *chosen, 2.0**-23, dtype)
    integers = QuantizePerTensorDynamic(x, scale, zero_point, *limits, dtype)
    return DequantizePerTensorDynamic(
        integers, scale, zero_point, *limits, dtype, out_dtype=x.dtype
    )


def through_codes(x, block=(-1, -1, -1)):
    block = list(block)
    scale = ChooseScales(x, None, block, 448.0, torch.float32)
    codes = QuantizeFloat(x, scale, None, block, "float8_e4m3fn")
    return DequantizeFloat(codes, scale, None, block, "float8_e4m3fn", out_dtype=x.dtype)


class Readers(nn.Module):
    def __init__(self, *quantizes):
        super().__init__()
        self.quantizes = quantizes

    def forward(self, x):
        h = x * 2.0
        return tuple(quantize(h) for quantize in self.quantizes)


class WrittenBetween(nn.Module):
    def forward(self, x):
        h = x * 2.0
        first = through(h)
        h.add_(1.0)
        return first, through(h)


class ReadScale(nn.Module):
    def forward(self, x):
        scale, zero_point = ChoosePerTensor(x, -128, 127, 2.0**-23, torch.int8)
        integers = QuantizePerTensorDynamic(x, scale, zero_point, -128, 127, torch.int8)
        return integers.float(), scale


def fused(model, edit=fuse_choose_tensor, dtype=torch.float32):
    x = torch.randn(2, 5, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    gm = captured(model, x)
    wanted = gm(x)
    result = edit(gm)
    for ours, theirs in zip(gm(x), wanted, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)
    return gm, result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("choose", [ChoosePerTensor, ChoosePerTensorSymmetric])
def test_fuse_choose_tensor_when_readers_are_alike_then_share_one_call_to_the_last_bit(
    choose, dtype
):
    gm, result = fused(Readers(*[lambda h: through(h, choose)] * 3), dtype=dtype)
    assert result.changed
    assert calls_of(gm) == ["quantize_per_tensor"]
    assert not any("choose" in name for name in calls_of(gm, "quantized_decomposed"))
    schemes = {str(scheme_of(gm, n)) for n in gm.graph.nodes if "dequantize" in n.name}
    assert schemes == {"int8[-128, 127] affine dynamic PerTensor()"}
    assert not fuse_choose_tensor(gm).changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fuse_choose_tensor_when_readers_want_codes_then_share_one_call_to_the_last_bit(dtype):
    model = Readers(through_codes, through_codes, lambda h: through_codes(h, (1, 1, -1)))
    gm, result = fused(model, fuse_choose_tensor_e4m3, dtype)
    assert result.changed
    calls = calls_of(gm)
    assert calls.count("quantize_per_tensor_e4m3") == calls.count("choose_scales") == 1
    assert not fuse_choose_tensor_e4m3(gm).changed


def test_fuse_choose_tensor_when_one_reader_is_symmetric_then_makes_two_calls():
    gm, _ = fused(Readers(through, lambda h: through(h, ChoosePerTensorSymmetric)))
    assert calls_of(gm) == ["quantize_per_tensor", "quantize_per_tensor"]


def test_fuse_choose_tensor_when_written_in_between_then_quantizes_again():
    gm, _ = fused(WrittenBetween())
    assert calls_of(gm) == ["quantize_per_tensor", "quantize_per_tensor"]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (ReadScale(), "its qparams are read by others too"),
        (Readers(lambda h: through(h, dtype=torch.uint8)), "its integers are torch.uint8"),
        (Readers(lambda h: through(h, low=-8, high=7)), "chosen for -128 .. 127, and -8 .. 7"),
    ],
)
def test_fuse_choose_tensor_when_a_choice_cannot_be_fused_then_stays_with_the_reason(model, reason):
    gm, result = fused(model)
    assert not result.changed
    assert calls_of(gm) == []
    assert reason in result.notes[0].text
