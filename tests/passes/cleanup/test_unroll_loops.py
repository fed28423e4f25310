"""Loops of a fixed number of rounds are written out; others stay."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.while_loop import while_loop

from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.unroll_loops import MOST_ROUNDS, has_loops, unroll_loops


class Counted(nn.Module):
    def __init__(self, rounds):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("shift", torch.linspace(-1, 1, 4))
        self.rounds = rounds

    def forward(self, x):
        def body(i, h):
            return i + 2, torch.tanh(self.linear(h)) + self.shift

        count, h = while_loop(lambda i, h: i < self.rounds, body, (torch.tensor(0), x))
        return h, count


def graph_of(model, x):
    return torch.export.export(model, (x,)).module(check_guards=False)


@pytest.mark.parametrize("rounds", [0, 1, 5])
def test_loop_when_it_counts_then_written_out(rounds):
    x = torch.randn(3, 4)
    gm = graph_of(Counted(rounds), x)
    expected = gm(x)
    names = set(dict(gm.named_buffers()))
    (record,) = run_passes(gm, (unroll_loops,), verify=True)
    assert record.changed
    assert not has_loops(gm)
    for found, wanted in zip(gm(x), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert sum("linear" in str(n.target) for n in gm.graph.nodes) >= (rounds + 1) // 2
    assert len(set(dict(gm.named_buffers())) - names) <= 1  # of the body, held once


class Until(nn.Module):
    def forward(self, x):
        return while_loop(lambda h: h.sum() > 1, lambda h: (h * 0.5,), (x.clone(),))[0]


class Written(nn.Module):
    """A counter that the model itself keeps from call to call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        self.calls.add_(1)
        start = self.calls.clone()
        return while_loop(lambda i, h: i < 4, lambda i, h: (i + 1, h * 2), (start, x.clone()))[1]


@pytest.mark.parametrize("model", [Until(), Written(), Counted(2 * MOST_ROUNDS + 2)])
def test_loop_when_its_rounds_are_not_fixed_or_too_many_then_stays(model):
    x = torch.randn(3, 4)
    gm = graph_of(model, x)
    (record,) = run_passes(gm, (unroll_loops,))
    assert not record.changed
    assert has_loops(gm)
