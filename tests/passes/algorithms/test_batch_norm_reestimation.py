"""Batch-norm re-estimation: a gain that rounding gives, norms that are left, what it declines."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.provenance import provenance_of

pytestmark = pytest.mark.usefixtures("unmeasured")


class Shrunk(nn.Module):
    """A layer whose first two rows lose a fifth of their weights to rounding at 3 bits."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layer = nn.Conv2d(16, 4, 1)
        with torch.no_grad():
            weight = 0.45 * torch.ones(4, 16) * torch.randn(4, 16, generator=generator).sign()
            weight[:, :8] *= 6
            weight[2:] = torch.randn(2, 16, generator=generator)
            self.layer.weight.copy_(weight[:, :, None, None])

    def forward(self, x):
        return self.layer(x)


class Left(nn.Module):
    """A batch norm that nothing can take: the input of it is a sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 1)
        self.norm, self.last = nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(self.norm(self.first(x) + self.second(x)).relu())


def images(count: int, seed: int = 0) -> list[torch.Tensor]:
    """Of 16 channels that have much in common."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(2, 1, 6, 6, generator=generator)
        + 0.3 * torch.randn(2, 16, 6, 6, generator=generator)
        for _ in range(count)
    ]


def gains(model, gm, data) -> torch.Tensor:
    """The gain of each channel of a graph over the model."""
    with torch.no_grad():
        x = torch.cat([model(d) for d in data]).transpose(0, 1).flatten(1)
        z = torch.cat([gm(d) for d in data]).transpose(0, 1).flatten(1)
    x, z = x - x.mean(1, keepdim=True), z - z.mean(1, keepdim=True)
    return (x * z).sum(1) / x.square().sum(1)


def test_gain_when_rounding_shrinks_channels_then_given_back_and_integers_stay(quantized):
    model, held = Shrunk(), images(16, seed=1)
    plain = quantized(model, images(16), "w3")
    gm = quantized(model, images(16), "w3", "batch_norm_reestimation")
    before, after = ((gains(model, g, held) - 1).abs()[:2] for g in (plain, gm))
    assert float(before.min()) > 0.05
    assert float(after.max()) < 0.3 * float(before.max())
    names = [name for name, b in plain.named_buffers() if b.dtype in (torch.int8, torch.uint8)]
    assert names
    for name in names:
        assert torch.equal(plain.get_buffer(name), gm.get_buffer(name))


def test_quality_when_channels_are_corrected_then_higher(quantized):
    model, held = Shrunk(), images(16, seed=1)
    with torch.no_grad():
        plain, found = (
            pq.sqnr_db([model(x) for x in held], [gm(x) for x in held])
            for gm in (
                quantized(model, images(16), "w3"),
                quantized(model, images(16), "w3", "batch_norm_reestimation"),
            )
        )
    assert found > plain + 0.2


def test_calls_when_there_is_one_sample_then_declined(quantized):
    gm = quantized(Shrunk(), [images(1)[0][:1]], "w3", "batch_norm_reestimation")
    assert "conv2d: one sample cannot be fitted and checked" in provenance_of(gm).notes
