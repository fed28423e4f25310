"""Moments from weights alone, held against those of a run on unit normal inputs to norms."""

import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.algorithms.channel_moments import ChannelMoments, quadrature
from pt2e_quant.passes.algorithms.channel_sizes import channel_sizes
from pt2e_quant.passes.cleanup.remove_dropout import remove_dropout

WIDTH, HIDDEN = 32, 48


def last(gm):
    """The node that the program returns."""
    return next(node for node in gm.graph.nodes if node.op == "output").all_input_nodes[0]


class Chain(nn.Module):
    """Norm, linear, activation and linear, with a residual around them or not."""

    def __init__(self, activation, *, residual: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.activation, self.residual = activation, residual
        with torch.no_grad():
            self.norm.weight.uniform_(0.2, 3.0)
            self.norm.bias.normal_()

    def forward(self, x):
        y = self.norm(x)
        z = self.second(self.activation(self.first(y)))
        return y + z if self.residual else z


def exported(model, *inputs):
    gm = torch.export.export(model.eval(), inputs).module()
    run_passes(gm, (remove_dropout,))
    return gm


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [F.gelu, F.silu, F.relu, torch.tanh, F.hardswish])
def test_moments_when_a_chain_begins_with_a_norm_then_near_those_of_a_run(activation, residual):
    torch.manual_seed(0)
    model = Chain(activation, residual=residual)
    found = ChannelMoments(gm := exported(model, torch.randn(1, 4, WIDTH))).of(last(gm))
    assert found is not None
    with torch.no_grad():
        values = model(torch.randn(20_000, WIDTH)).double()
    # channels are not independent behind a linear, which moves single variances up to threefold
    deviation = values.std(0)
    assert ((found.mean - values.mean(0)).abs() / deviation).max() < 0.1
    ratio = found.variance / values.var(0)
    assert ratio.log().abs().max() < 1.1
    assert ratio.log().square().mean().sqrt() < 0.35


def test_moments_when_a_norm_normalises_a_known_tensor_then_its_spread_counts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH))
    with torch.no_grad():
        model[0].weight[3] = 20.0
    found = ChannelMoments(gm := exported(model, torch.randn(1, WIDTH))).of(last(gm))
    assert found is not None
    assert found.variance[3] > 100 * found.variance[4]
    # together they have variance 1
    torch.testing.assert_close(found.variance.mean(), torch.tensor(1.0).double())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (
            part(y).view(1, -1, 4, WIDTH // 4).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        found = F.scaled_dot_product_attention(q, k, v)
        return found.transpose(1, 2).reshape(1, -1, WIDTH)


def test_moments_when_attention_averages_then_the_values_channels_in_order():
    torch.manual_seed(0)
    model = Attention()
    with torch.no_grad():
        model.v.bias.copy_(torch.arange(WIDTH))
        model.v.weight[7] *= 10
    found = ChannelMoments(gm := exported(model, torch.randn(1, 6, WIDTH))).of(last(gm))
    assert found is not None
    torch.testing.assert_close(found.mean, torch.arange(WIDTH).double())
    assert int(found.variance.argmax()) == 7


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(WIDTH, 4),
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Softmax(-1)),
        nn.LayerNorm((4, WIDTH)),
    ],
)
def test_moments_when_no_rule_says_them_then_none(model):
    found = ChannelMoments(gm := exported(model, torch.randn(2, 4, WIDTH)))
    assert found.of(last(gm)) is None


def test_moments_when_a_residual_stream_is_deep_then_walked_without_recursion():
    torch.manual_seed(0)

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            y = self.norm(x)
            for _ in range(600):
                y = y + 1.0
            return y

    gm = exported(Deep(), torch.randn(1, 4))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(500)
    try:
        found = ChannelMoments(gm).of(last(gm))
    finally:
        sys.setrecursionlimit(limit)
    assert found is not None
    torch.testing.assert_close(found.mean, torch.full((4,), 600.0).double())


@pytest.mark.parametrize("opposed", [False, True])
def test_sizes_when_gate_and_value_are_alike_then_tails_on_one_side(opposed):
    torch.manual_seed(0)

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH)
            self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
            with torch.no_grad():
                self.up.weight.copy_(0.7 * self.gate.weight + 0.5 * self.up.weight)
                self.up.weight *= -20 if opposed else 20
                self.gate.weight *= 20

        def forward(self, x):
            y = self.norm(x)
            return F.silu(self.gate(y)) * self.up(y)

    model = Product()
    found = channel_sizes(ChannelMoments(gm := exported(model, torch.randn(1, WIDTH))), last(gm))
    assert found is not None
    with torch.no_grad():
        values = model(torch.randn(20_000, WIDTH)).double()
    long, short = (found.below, found.above) if opposed else (found.above, found.below)
    tail = values.clamp(max=0) if opposed else values.clamp(min=0)
    assert (long > 3 * short).all()
    # the eighth power of 20000 samples is itself known to some 10 %
    assert ((long / tail.pow(8).mean(0) ** (1 / 8)).log().abs() < 0.35).all()
    assert ((found.mean_square / values.square().mean(0)).log().abs() < 0.2).all()


def test_quadrature_when_a_polynomial_then_its_expectation():
    points, weights = quadrature(16)
    for power, expected in ((0, 1.0), (1, 0.0), (2, 1.0), (4, 3.0), (8, 105.0), (16, 2027025.0)):
        assert float(points.pow(power) @ weights) == pytest.approx(expected, rel=1e-9, abs=1e-9)
