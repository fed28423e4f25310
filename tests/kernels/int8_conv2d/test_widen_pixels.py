"""Convolutions of 3 channels read 4 where a kernel quantizes their image; nothing else changes."""

import pytest
import torch
from torch import nn

from pt2e_quant.core.qdq import DequantizePerChannel, QuantizePerTensor
from pt2e_quant.graph.show import show
from pt2e_quant.kernels.int8_conv2d.op import KERNELS, Int8Conv2d, widen_pixels
from pt2e_quant.kernels.int8_conv2d.pack import fill_channels, window_sums
from pt2e_quant.kernels.quantize.op import QuantizePixels
from tests.kernels.lowering import calls_of, captured, fuse, qdq


class Stem(nn.Module):
    """Convolutions of one quantized image, and what else reads it."""

    def __init__(self, channels=3, groups=1, count=1, reads_more=False):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shape = (6, channels // groups, 3, 3)
        weight = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", torch.rand(6, generator=generator) * 0.01)
        self.register_buffer("zeros", torch.zeros(6, dtype=torch.int64))
        self.groups, self.count, self.reads_more = groups, count, reads_more

    def forward(self, x):
        image = qdq(x, 0.05, 7)
        found = []
        for padding in range(self.count):
            args = (self.weight, self.scale, self.zeros, 0, -128, 127, torch.int8)
            weight = DequantizePerChannel(*args)
            found.append(nn.functional.conv2d(image, weight, padding=padding, groups=self.groups))
        return (*found, image * 2) if self.reads_more else tuple(found)


def lowered(model, x):
    """The fused graph before and after the pass, its results held equal, and the pass's result."""
    gm = fuse(captured(model, x), KERNELS)
    wanted = gm(x)
    result = widen_pixels(gm)
    for ours, theirs in zip(gm(x), wanted, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    return gm, result


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_widen_pixels_when_an_image_has_three_channels_then_it_becomes_words(layout):
    x = torch.randn(2, 3, 7, 6, generator=torch.Generator().manual_seed(0)) * 4
    gm, result = lowered(Stem(count=2), x.contiguous(memory_format=layout))
    assert result.changed
    assert calls_of(gm) == ["quantize_pixels", "int8_conv2d", "int8_conv2d"]
    for conv in (n for n in gm.graph.nodes if n.target is Int8Conv2d):
        words, weight = conv.args[0].meta["val"], conv.args[3].meta["val"]
        assert list(words.shape) == [2, 4, 7, 6]
        assert words.is_contiguous(memory_format=torch.channels_last)
        assert list(weight.shape) == [6, 3, 3, 4]
    before = show(gm)
    assert not widen_pixels(gm).changed
    assert show(gm) == before


@pytest.mark.parametrize(
    "model",
    [Stem(channels=4), Stem(channels=3, groups=3), Stem(reads_more=True)],
    ids=["four channels", "groups", "others read the image"],
)
def test_widen_pixels_when_channels_groups_or_readers_are_others_then_the_image_stays(model):
    channels = model.weight.shape[1] * model.groups
    x = torch.randn(1, channels, 5, 5, generator=torch.Generator().manual_seed(0))
    gm, result = lowered(model, x)
    assert not result.changed
    assert not [n for n in gm.graph.nodes if n.target is QuantizePixels]
    assert [n for n in gm.graph.nodes if n.target is QuantizePerTensor]


def test_widen_pixels_when_others_read_the_image_then_gives_the_reason():
    x = torch.randn(1, 3, 5, 5, generator=torch.Generator().manual_seed(0))
    _, result = lowered(Stem(reads_more=True), x)
    assert "others than plain convolutions read them" in result.notes[0].text


def test_operator_when_checked_by_torch_then_is_whole():
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    named = {"out_scale": 0.03, "out_zero_point": -9}
    torch.library.opcheck(QuantizePixels, (x,), named)
    made = QuantizePixels(x, **named)
    wanted = QuantizePerTensor(x, 0.03, -9, -128, 127, torch.int8)
    assert torch.equal(made[:, :3], wanted)
    assert (made[:, 3] == -9).all()


def test_fill_channels_when_undone_then_weights_and_their_sums_are_the_same():
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-128, 128, (5, 3, 2, 3), dtype=torch.int8, generator=generator)
    filled = fill_channels(packed, 4)
    assert torch.equal(filled[..., :3], packed)
    sums = [window_sums(weight.permute(0, 3, 1, 2)) for weight in (packed, filled)]
    assert torch.equal(*sums)
