import torch

from pt2e_quant.training.rounding import Rounding, round_to_integers, to_bfloat16


def test_round_to_integers_when_stochastic_then_right_on_average():
    torch.manual_seed(0)
    x = torch.tensor([0.25, -0.75, 3.0]).repeat(20000, 1)
    found = round_to_integers(x, Rounding.STOCHASTIC)
    # five standard deviations of a mean of 20000 coins
    assert (found.mean(0) - x[0]).abs().max() < 5 * 0.5 / 20000**0.5
    assert torch.equal(found[:, 2], x[:, 2])
    assert round_to_integers(torch.tensor([0.5, 1.5]), Rounding.NEAREST).tolist() == [0.0, 2.0]


def test_to_bfloat16_when_stochastic_then_a_neighbour_and_right_on_average():
    torch.manual_seed(0)
    for value in (1.001, -1.001):
        x = torch.full((40000,), value)
        found = to_bfloat16(x, Rounding.STOCHASTIC).float()
        step = 2.0**-7
        assert set(found.abs().unique().tolist()) == {1.0, 1.0 + step}
        assert abs(found.double().mean().item() - value) < 5 * step / 2 / 40000**0.5


def test_to_bfloat16_when_not_finite_then_it_stays():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0])
    found = to_bfloat16(x, Rounding.STOCHASTIC).float()
    assert torch.equal(found[:2], x[:2])
    assert found[2].isnan()
    assert found[3] == 0
    assert torch.equal(to_bfloat16(x, Rounding.NEAREST)[:2].float(), x[:2])
