"""AdaRound: near the best rounding there is, and never worse than plain on its data."""

import itertools

import pytest
import torch
from torch import nn

from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.passes.algorithms import AdaRound
from pt2e_quant.passes.algorithms.grid import Grid
from pt2e_quant.passes.algorithms.row_moments import RowMoments

pytestmark = pytest.mark.usefixtures("unmeasured")


def moments(rows: torch.Tensor, x: torch.Tensor) -> RowMoments:
    square = (x.T @ x / len(x))[None]
    target = rows @ square
    return RowMoments(square, target, (target * rows).sum(2))


def test_integers_when_rows_are_short_then_a_third_of_the_error_of_plain():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1, 64, 8, generator=generator)
    x = torch.randn(400, 3, generator=generator) @ torch.randn(3, 8, generator=generator)
    known = moments(rows, x + 0.1 * torch.randn(400, 8, generator=generator))
    grid = Grid(torch.full_like(rows, 0.5), torch.zeros_like(rows), -8, 7)
    found = known.errors(AdaRound()._round(rows, grid, known))
    low = (rows / 0.5).floor()
    best = torch.full((1, 64), torch.inf)
    for ups in itertools.product((0.0, 1.0), repeat=8):
        best = torch.minimum(best, known.errors((low + torch.tensor(ups)) * 0.5))
    plain = known.errors(grid.nearest(rows))
    assert bool((found >= best - 1e-5).all())
    assert float(found.sum()) < 0.35 * float(plain.sum())


def test_error_when_inputs_are_correlated_then_half_and_on_record(quantized, output_error):
    torch.manual_seed(0)
    model, mixing = nn.Sequential(nn.Conv2d(32, 16, 1)).eval(), torch.randn(4, 32)

    def images(count, seed):
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(1, 6, 6, 4, generator=generator) @ mixing for _ in range(count)]
        return [x.permute(0, 3, 1, 2) for x in made]

    held = images(8, 1)
    plain = output_error(model, quantized(model, images(8, 0), "w3"), held)
    gm = quantized(model, images(8, 0), "w3", AdaRound(iterations=200))
    assert output_error(model, gm, held) < plain / 2
    (record,) = (r for r in provenance_of(gm).tensors if r.steps)
    assert "rounded the other way" in record.steps[0]


def test_twice_when_run_then_the_same_integers(quantized):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 8)).eval(), torch.randn(4, 16)
    outputs = [quantized(model, [x], "w3", AdaRound(iterations=50))(x) for _ in range(2)]
    assert torch.equal(*outputs)
