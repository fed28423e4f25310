"""One layer of one direction: torch's own modules, and rounding between the steps."""

import pytest
import torch
from torch import nn

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.recurrent_ops import Cell, RecurrentLayer, Rounding, gate_count
from pt2e_quant.flow.calibrate.sample import sqnr_db

MODULES = {
    Cell.LSTM: lambda **k: nn.LSTM(6, 8, **k),
    Cell.GRU: lambda **k: nn.GRU(6, 8, **k),
    Cell.RNN_TANH: lambda **k: nn.RNN(6, 8, **k),
    Cell.RNN_RELU: lambda **k: nn.RNN(6, 8, nonlinearity="relu", **k),
}


def operands(cell, **options):
    torch.manual_seed(0)
    module = MODULES[cell](**options).requires_grad_(False)
    x, h = torch.randn(5, 3, 6), torch.rand(3, options.get("proj_size") or 8) - 0.5
    c = torch.rand(3, 8) - 0.5 if cell is Cell.LSTM else None
    found = [getattr(module, f"{n}_l0", None) for n in ("weight_ih", "weight_hh")]
    found += [getattr(module, f"{n}_l0", None) for n in ("bias_ih", "bias_hh", "weight_hr")]
    state = h[None] if c is None else (h[None], c[None])
    return (x, h, c, *found), module, state


@pytest.mark.parametrize("options", [{}, {"bias": False}])
@pytest.mark.parametrize("cell", Cell)
@pytest.mark.parametrize("rounding", Rounding)
def test_layer_when_rounded_or_not_then_it_is_torchs_within_the_rounding(cell, rounding, options):
    args, module, state = operands(cell, **options)
    expected = module(args[0], state)
    y, c = RecurrentLayer(*args, cell, False, rounding)
    least = 100.0 if rounding is Rounding.NONE else 35.0
    assert sqnr_db(expected[0], y) > least
    if cell is Cell.LSTM:
        assert sqnr_db(expected[1][1][0], c) > least
    else:
        assert c.numel() == 0


@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("rounding", Rounding)
def test_layer_when_projected_then_it_is_torchs_within_the_rounding(rounding):
    args, module, state = operands(Cell.LSTM, proj_size=4)
    y, _ = RecurrentLayer(*args, Cell.LSTM, False, rounding)
    assert y.shape == (5, 3, 4)
    assert sqnr_db(module(args[0], state)[0], y) > (100.0 if rounding is Rounding.NONE else 35.0)


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("cell", Cell)
def test_layer_when_reversed_then_it_is_the_flipped_inputs(cell, rounding):
    args, _, _ = operands(cell)
    y, _ = RecurrentLayer(*args, cell, True, rounding)
    flipped, _ = RecurrentLayer(args[0].flip(0), *args[1:], cell, False, rounding)
    torch.testing.assert_close(y, flipped.flip(0), rtol=0, atol=0)


def test_layer_when_rounded_per_row_then_another_row_changes_nothing():
    args, _, _ = operands(Cell.LSTM)
    first = [a if i > 2 or a is None else a.narrow(a.dim() - 2, 0, 1) for i, a in enumerate(args)]
    both, _ = RecurrentLayer(*args, Cell.LSTM, False, Rounding.PER_ROW)
    alone, _ = RecurrentLayer(*first, Cell.LSTM, False, Rounding.PER_ROW)
    torch.testing.assert_close(both[:, :1], alone)


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("cell", Cell)
def test_operator_when_checked_then_fake_and_real_agree(cell, rounding):
    args, _, _ = operands(cell)
    torch.library.opcheck(
        RecurrentLayer,
        (*args, str(cell), False, str(rounding)),
        test_utils=("test_schema", "test_faketensor"),
    )
    assert args[3].shape[0] == 8 * gate_count(cell)


@pytest.mark.parametrize(("cell", "rounding"), [("lstn", "none"), ("lstm", "per_token")])
def test_operator_when_a_name_is_unknown_then_refuses(cell, rounding):
    args, _, _ = operands(Cell.LSTM)
    with pytest.raises(ConfigError, match="is not a valid"):
        RecurrentLayer(*args, cell, False, rounding)
