"""Recurrent operators become layers of one direction; what is left keeps its reason."""

import pytest
import torch
from torch import nn

from pt2e_quant.core.recurrent_ops import RecurrentLayer, Rounding
from pt2e_quant.graph.ops import aten
from pt2e_quant.passes.recurrent.split_recurrent import split_recurrent

pytestmark = [
    pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning"),
]

split_unrounded = split_recurrent(lambda node, sizes: Rounding.NONE)
KINDS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn_tanh": nn.RNN,
    "rnn_relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
}


def captured(module, *args, dynamic_shapes=None):
    program = torch.export.export(module, args, dynamic_shapes=dynamic_shapes)
    return program.module(check_guards=False)


def targets(gm):
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 3, "bias": False},
        {"num_layers": 2, "bidirectional": True, "batch_first": True},
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_operator_when_split_then_all_results_are_the_same(kind, options):
    torch.manual_seed(0)
    x = torch.randn(4, 4, 6)
    gm = captured(KINDS[kind](6, 8, **options).eval(), x)
    expected = torch.utils._pytree.tree_leaves(gm(x))
    assert split_unrounded(gm).changed
    layers = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    assert targets(gm).count(RecurrentLayer) == layers
    for a, b in zip(expected, torch.utils._pytree.tree_leaves(gm(x)), strict=True):
        torch.testing.assert_close(a, b)
    assert not split_unrounded(gm).changed


@pytest.mark.parametrize("place", [0, 1])
def test_operator_when_one_result_is_read_then_it_is_the_same(place):
    """`prepare` has removed the other's reader by then."""
    torch.manual_seed(0)
    x = torch.randn(4, 4, 6)
    gm = captured(nn.GRU(6, 8).eval(), x)
    (output,) = gm.graph.find_nodes(op="output")
    output.args = ([output.args[0][place]],)
    gm.graph.set_codegen(torch.fx.graph.CodeGen())
    gm.graph.eliminate_dead_code()
    gm.recompile()
    (expected,) = gm(x)
    assert split_unrounded(gm).changed
    torch.testing.assert_close(gm(x)[0], expected)


def test_operator_when_given_a_state_and_a_projection_then_results_are_the_same():
    torch.manual_seed(0)
    x, state = torch.randn(4, 3, 6), (torch.randn(2, 3, 5), torch.randn(2, 3, 8))
    gm = captured(nn.LSTM(6, 8, 2, proj_size=5), x, state)
    expected = torch.utils._pytree.tree_leaves(gm(x, state))
    assert split_unrounded(gm).changed
    for a, b in zip(expected, torch.utils._pytree.tree_leaves(gm(x, state)), strict=True):
        torch.testing.assert_close(a, b)


def test_operator_when_the_batch_is_dynamic_then_it_stays_so():
    gm = captured(
        Only(nn.GRU(6, 8, batch_first=True)),
        torch.randn(3, 4, 6),
        dynamic_shapes=({0: torch.export.Dim("batch", max=16)},),
    )
    assert split_unrounded(gm).changed
    assert gm(torch.randn(9, 4, 6)).shape == (9, 4, 8)


class Only(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)[0]


def test_operator_when_it_drops_values_then_it_is_left():
    gm = captured(Only(nn.LSTM(6, 8, 2, dropout=0.5)), torch.randn(4, 3, 6))
    result = split_unrounded(gm)
    assert not result.changed
    assert [note.text for note in result.notes] == ["it drops values at random between its layers"]


def test_operator_when_declined_then_the_reason_is_in_the_note():
    gm = captured(Only(nn.LSTM(6, 8)).eval(), torch.randn(4, 3, 6))
    result = split_recurrent(lambda node, sizes: f"{sizes.cell} of {sizes.hidden}")(gm)
    assert not result.changed
    assert [(n.text, n.skipped) for n in result.notes] == [("lstm of 8", True)]
    assert aten.lstm.input in targets(gm)


def test_operator_when_in_double_then_it_is_left():
    gm = captured(Only(nn.GRU(6, 8).double()), torch.randn(4, 3, 6).double())
    assert [n.text for n in split_unrounded(gm).notes] == ["its weights are not float32"]
