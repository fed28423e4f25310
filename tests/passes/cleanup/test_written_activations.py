"""Activations that are written out are found in every way that people write them, and no others."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import pt2e_quant as pq
from pt2e_quant.passes.cleanup.written_activations import name_activations
from tests.call_function import Call

X = torch.linspace(-8, 8, 60).view(3, 20)
ROOT = math.sqrt(2 / math.pi)
WRITTEN = {
    "silu": (
        lambda x: x * torch.sigmoid(x),
        lambda x: x.sigmoid() * x,
        lambda x: x.sigmoid().mul(x) * 1.0,
    ),
    "hardsigmoid": (
        lambda x: F.relu6(x + 3) / 6,
        lambda x: F.hardtanh(3.0 + x, 0, 6) * (1 / 6),
        lambda x: (x + 3).clamp(0, 6) / 6.0,
    ),
    "hardswish": (
        lambda x: x * F.relu6(x + 3) / 6,
        lambda x: x * (F.relu6(x + 3.0, inplace=True) / 6.0),
        lambda x: x * F.hardsigmoid(x),
        lambda x: (x / 6) * (x + 3).clamp(0, 6),
        lambda x: F.hardtanh(x + 3, 0.0, 6.0).mul(x).div(6),
    ),
    "gelu": (
        lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
        lambda x: 0.5 * x * (torch.erf(x * 0.70710678) + 1),
        lambda x: 0.5 * (x * (1 + torch.erf(x / 1.41421))),
        lambda x: x * ((1 + torch.erf(x / math.sqrt(2))) / 2),
        lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
        lambda x: x * 0.5 * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
        lambda x: 0.5 * x * (1 + torch.tanh(0.79788 * (0.044715 * x * x * x + x))),
        lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * x.square() * x))),
    ),
    "mish": (
        lambda x: x * torch.tanh(F.softplus(x)),
        lambda x: F.softplus(x).tanh() * x,
        lambda x: x * torch.tanh(torch.log1p(torch.exp(x))),
    ),
    "relu": (
        lambda x: torch.maximum(x, torch.zeros_like(x)),
        lambda x: torch.max(x, torch.tensor(0.0)),
        lambda x: torch.maximum(x.new_zeros(1), x),
        lambda x: F.threshold(x, 0.0, 0.0),
        lambda x: x.clamp_min(0),
        lambda x: x * (x > 0),
        lambda x: x * (x >= 0).float(),
        lambda x: x * (x > 0).type_as(x),
        lambda x: (x > 0).to(x) * x,
        lambda x: torch.where(x > 0, x, 0.0),
        lambda x: torch.where(x < 0, torch.zeros_like(x), x),
        lambda x: x.masked_fill(x < 0, 0.0),
        lambda x: (x + x.abs()) / 2,
    ),
    "leaky_relu": (
        lambda x: torch.maximum(x, 0.1 * x),
        lambda x: torch.where(x > 0, x, x * 0.2),
        lambda x: torch.where(x >= 0, 1.0, 0.01) * x,
        lambda x: F.relu(x) - 0.3 * F.relu(-x),
        lambda x: 0.6 * x + 0.4 * x.abs(),
    ),
    "elu": (
        lambda x: torch.where(x > 0, x, torch.exp(x) - 1),
        lambda x: F.relu(x) + 0.5 * torch.expm1(-F.relu(-x)),
        lambda x: F.celu(x),
    ),
    "clamp": (
        lambda x: torch.minimum(torch.maximum(x, torch.tensor(-1.0)), torch.tensor(2.5)),
        lambda x: F.relu(x).clamp_max(4),
        lambda x: 1 - F.relu(1 - x),
    ),
    "softplus": (
        lambda x: torch.log(1 + torch.exp(x)),
        lambda x: torch.exp(x).log1p(),
        lambda x: F.relu(x) + torch.log1p(torch.exp(-x.abs())),
        lambda x: -F.logsigmoid(-x),
    ),
    "sigmoid": (
        lambda x: 1 / (1 + torch.exp(-x)),
        lambda x: torch.exp(x) / (1 + torch.exp(x)),
        lambda x: 0.5 * (torch.tanh(x / 2) + 1),
        lambda x: torch.reciprocal(1 + torch.exp(-x)),
    ),
    "tanh": (
        lambda x: 2 * torch.sigmoid(2 * x) - 1,
        lambda x: (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x)),
        lambda x: 1 - 2 / (torch.exp(2 * x) + 1),
    ),
}
OTHERS = {
    "complex": lambda x: (x * 2j * (1 + torch.erf(x)) + (x + 1j) * 0.5).real,
    "numbers": lambda x: 2.0 / x * 0.5 + (1.0 - x) / 6,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "swish_of_another": lambda x: x * torch.sigmoid(x + 1),
    "twice_silu": lambda x: 2 * (x * (2 * torch.sigmoid(x))),
    "relu6_of_two": lambda x: x * F.relu6(x + 2) / 6,
    "relu5": lambda x: x * (x + 3).clamp(0, 5) / 6,
    "a_fifth": lambda x: x * F.relu6(x + 3) / 5,
    "erf_of_x": lambda x: 0.5 * x * (1 + torch.erf(x)),
    "half_missing": lambda x: x * (1 + torch.erf(x / math.sqrt(2))),
    "another_cubic": lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.05 * x**3))),
    "square_in_sum": lambda x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * x * x))),
    "beta_of_softplus": lambda x: x * torch.tanh(F.softplus(x, 2.0)),
    "broadcast": lambda x: x * torch.sigmoid(x[:1]),
    "abs": lambda x: torch.maximum(x, -x),
    "shrunk": lambda x: torch.where(x.abs() < 1e-3, torch.zeros_like(x), x),
    "threshold": lambda x: F.threshold(x, 0.01, 0.0),
    "one_number": lambda x: torch.where(x == 3.3, torch.zeros_like(x), F.relu(x)),
    "negative_kept": lambda x: torch.where(x < 0, x, 2 * x),
    "straight_through": lambda x: x + (F.relu(x) - x).detach(),
    "rounded": lambda x: torch.round(x) * torch.sigmoid(x),
    "two_results": lambda x: torch.frexp(x)[0] * torch.sigmoid(x),
    "of_another": lambda x: torch.where(x > 0, x, 0.1 * x.flip(0)),
    "alpha": lambda x: x * F.relu6(torch.add(x, 3, alpha=2)) / 6,
}


def captured(function, x=X):
    gm = torch.export.export(Call(function), (x,)).module(check_guards=False)
    return gm


def names(gm):
    return [str(n.target).split(".")[1] for n in gm.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(
    ("name", "at"), [(n, at) for n in WRITTEN for at in range(len(WRITTEN[n]))]
)
def test_activation_when_written_out_then_the_operator_alone(name, at):
    program = torch.export.export(Call(WRITTEN[name][at]), (X,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pq.Pt2eQuantWarning)  # some are not quantized by themselves
        gm = pq.prepare_pt2e(program, pq.backends.get("onnx").quantizer(), strict=False)
    assert names(gm) == [name]
    torch.testing.assert_close(gm(X), WRITTEN[name][at](X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_product_when_it_is_no_activation_then_it_stays(name):
    gm = captured(OTHERS[name])
    assert not name_activations(gm).changed


def test_activation_when_its_gate_is_read_elsewhere_then_both_are_right():
    def forward(x):
        gate = torch.sigmoid(x)
        return x * gate + gate

    gm = captured(forward)
    assert name_activations(gm).changed
    torch.testing.assert_close(gm(X), forward(X))


@given(st.permutations(range(3)), st.booleans())
def test_gelu_when_its_factors_are_in_any_order_then_found(order, left):
    def forward(x):
        factors = [x, 0.5, 1 + torch.erf(x / math.sqrt(2))]
        a, b, c = (factors[at] for at in order)
        return (a * b) * c if left else a * (b * c)

    gm = captured(forward)
    assert name_activations(gm).changed
    assert "gelu" in names(gm)
    torch.testing.assert_close(gm(X), F.gelu(X), rtol=1e-4, atol=1e-5)
