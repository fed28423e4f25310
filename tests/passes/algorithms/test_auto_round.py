"""AutoRound: blocks, what they gain, seeds, and an early end."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.passes.algorithms import AutoRound

pytestmark = pytest.mark.usefixtures("unmeasured")

QUICK = AutoRound(iterations=60, learning_rate=0.02)


class Block(nn.Module):
    """A residual MLP and a linear behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.up = nn.Linear(32, 32), nn.Linear(32, 64)
        self.down, self.last = nn.Linear(64, 32), nn.Linear(32, 8)

    def forward(self, x):
        x = self.stem(x)
        return self.last(x + self.down(torch.relu(self.up(x))))


def rows(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(4, 32, generator=torch.Generator().manual_seed(5))
    return [torch.randn(1, 24, 4, generator=generator) @ mixing for _ in range(count)]


@pytest.mark.parametrize("recipe", ["w3", "w4_g32"])
def test_error_when_inputs_are_correlated_then_less_block_by_block(quantized, output_error, recipe):
    model, held = Block(), rows(8, seed=1)
    plain = output_error(model, quantized(model, rows(8), recipe), held)
    gm = quantized(model, rows(8), recipe, QUICK)
    assert output_error(model, gm, held) < plain / 1.4
    done = [note for note in provenance_of(gm).notes if "auto_round: " in note]
    assert [note.split(", ")[-1] for note in done] == ["1 weights", "2 weights", "1 weights"]


def test_static_int8_when_activations_are_rounded_too_then_better(quantized):
    model, held = Block(), rows(6, seed=1)
    with torch.no_grad():
        plain, found = (
            pq.sqnr_db([model(x) for x in held], [gm(x) for x in held])
            for gm in (
                quantized(model, rows(6), "int8"),  # of fewer than 8 calls: rounded plainly
                quantized(model, rows(6), "int8", AutoRound(iterations=100)),
            )
        )
    assert found > plain + 0.1


def test_seed_when_the_same_then_the_same_integers_else_others(quantized):
    x = rows(1, seed=1)[0]
    short = {"iterations": 10, "learning_rate": 0.05}
    found = [quantized(Block(), rows(4), "w3", AutoRound(seed=s, **short))(x) for s in (0, 0, 1)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_training_when_nothing_gets_better_then_it_ends_and_declines(quantized):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 4)).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.randint(-3, 4, (4, 16)).float())
        model[0].weight[:, 0] = 3.0
    data = [torch.randn(8, 16)]
    gm = quantized(model, data, "w3", AutoRound(iterations=40), search="min_max")
    notes = provenance_of(gm).notes
    assert any("no shift of its weights lowers" in note for note in notes)
