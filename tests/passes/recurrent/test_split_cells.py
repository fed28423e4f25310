"""Recurrent cells become linears and gates."""

import pytest
import torch
from torch import nn

from pt2e_quant.graph.ops import LINEAR, RECURRENT_CELL, is_call
from pt2e_quant.passes.recurrent.split_recurrent import split_cells

CELLS = {
    "lstm": nn.LSTMCell,
    "gru": nn.GRUCell,
    "rnn_tanh": nn.RNNCell,
    "rnn_relu": lambda *a, **k: nn.RNNCell(*a, nonlinearity="relu", **k),
}
split_all = split_cells(lambda node: True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", CELLS)
def test_cell_when_split_then_results_are_the_same(kind, bias):
    torch.manual_seed(0)
    x, h = torch.randn(3, 6), torch.randn(3, 8)
    state = (h, torch.randn(3, 8)) if kind == "lstm" else h
    program = torch.export.export(CELLS[kind](6, 8, bias=bias).eval(), (x, state))
    gm = program.module(check_guards=False)
    expected = torch.utils._pytree.tree_leaves(gm(x, state))
    assert split_all(gm).changed
    assert sum(is_call(n, LINEAR) for n in gm.graph.nodes) == 2
    assert not any(is_call(n, RECURRENT_CELL) for n in gm.graph.nodes)
    for a, b in zip(expected, torch.utils._pytree.tree_leaves(gm(x, state)), strict=True):
        torch.testing.assert_close(a, b)
    assert not split_all(gm).changed


def test_cell_when_not_wanted_then_it_stays():
    program = torch.export.export(nn.GRUCell(6, 8).eval(), (torch.randn(3, 6),))
    gm = program.module(check_guards=False)
    assert not split_cells(lambda node: False)(gm).changed
