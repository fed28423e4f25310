"""Low-rank error correction: an error of low rank goes, another stays."""

import torch
from torch import nn

from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.passes.algorithms.low_rank import LowRank

WIDTH = 64


def samples(rank: int, count: int = 8, seed: int = 0) -> list[torch.Tensor]:
    """Rows in a space of so many dimensions, and a little noise in all."""
    mixing = torch.randn(rank, WIDTH, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, 32, rank, generator=generator) @ mixing
        + 1e-3 * torch.randn(1, 32, WIDTH, generator=generator)
        for _ in range(count)
    ]


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64))


def test_low_rank_when_inputs_have_the_rank_then_next_to_no_error(quantized, output_error):
    model, held = linear(), samples(8, seed=1)
    plain = output_error(model, quantized(model, samples(8), "w3"), held)
    gm = quantized(model, samples(8), "w3", LowRank(rank=8, damping=1e-6))
    assert output_error(model, gm, held) < plain / 1000
    floats = [r for r in provenance_of(gm).floats if "low_rank put it there" in r.reason]
    assert [r.size for r in floats] == [4 * 8 * (WIDTH + 64)]


def test_low_rank_when_its_error_is_of_full_rank_then_declined(quantized):
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(1, 256, WIDTH, generator=generator)]
    gm = quantized(linear(), data, "w3", LowRank(rank=2))
    assert any("no part of low rank" in note for note in provenance_of(gm).notes)


def test_low_rank_when_factors_are_not_small_then_declined(quantized):
    gm = quantized(linear(), samples(8), "w3", "low_rank")
    assert any("are not small beside" in note for note in provenance_of(gm).notes)


def test_low_rank_when_inputs_are_static_integers_then_declined(quantized):
    gm = quantized(linear(), samples(8), "int8", LowRank(rank=8))
    assert any("in integers alone" in note for note in provenance_of(gm).notes)
