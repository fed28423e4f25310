"""Learned ranges: first values and gradients held against the papers' formulas."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.observers.static.mse import MSEObserver
from pt2e_quant.observers.training.learnable_fake_quantize import LearnableFakeQuantize
from pt2e_quant.observers.training.learned_step import LSQObserver, LSQPlusWeightObserver

LIMITS = {4: (-8, 7), 8: (-128, 127)}


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", LIMITS)
def test_lsq_when_weights_are_seen_then_the_papers_step(bits):
    low, high = LIMITS[bits]
    observer = LSQObserver(torch.int8, quant_min=low, quant_max=high)
    w = data(5, 7)
    observer(w)
    scale, zero_point = observer.calculate_qparams()
    torch.testing.assert_close(scale, 2 * w.abs().mean().reshape(1) / high**0.5)
    assert zero_point.tolist() == [0]


def test_lsq_when_activations_are_unsigned_then_from_quant_min():
    observer = LSQObserver(torch.uint8, torch.per_tensor_affine, quant_min=0, quant_max=15)
    batches = [data(3, 4, seed=i).relu() for i in range(3)]
    for batch in batches:
        observer(batch)
    scale, zero_point = observer.calculate_qparams()
    mean = sum(2 * b.mean() / 15**0.5 for b in batches) / 3
    torch.testing.assert_close(scale, mean.reshape(1))
    assert zero_point.tolist() == [0]


@pytest.mark.parametrize("bits", LIMITS)
def test_lsq_plus_when_weights_are_seen_then_three_deviations(bits):
    low, high = LIMITS[bits]
    observer = LSQPlusWeightObserver(
        torch.int8, torch.per_channel_symmetric, quant_min=low, quant_max=high, ch_axis=1
    )
    w = data(6, 3) + 0.3
    observer(w)
    mean, std = w.mean(0), w.std(0, correction=0)
    expected = torch.maximum((mean - 3 * std).abs(), (mean + 3 * std).abs()) / 2 ** (bits - 1)
    torch.testing.assert_close(observer.calculate_qparams()[0], expected)


def lsq_forward(v, s, low, high):
    """The paper's quantizer, with its gradient spelled by detach: equation 1, 2 and 3."""
    bar = (v / s).clamp(low, high)
    return ((bar.round() - bar).detach() + bar) * s


@settings(max_examples=30)
@given(st.integers(0, 999), st.sampled_from([4, 8]), st.booleans(), st.booleans())
def test_gradients_when_learning_then_the_papers(seed, bits, per_channel, scaled):
    low, high = LIMITS[bits]
    qscheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric
    made = LearnableFakeQuantize(
        LSQObserver,
        quant_min=low,
        quant_max=high,
        use_grad_scaling=scaled,
        dtype=torch.int8,
        qscheme=qscheme,
    )
    w = data(4, 9, seed=seed)
    made(w)
    made.enable_range_learning()
    x = w.clone().requires_grad_()
    weights = data(4, 9, seed=seed + 1)
    (made(x) * weights).sum().backward()
    s = made.scale.detach().double().requires_grad_()
    v = w.double().requires_grad_()
    (lsq_forward(v, s.reshape(-1, 1) if per_channel else s, low, high) * weights).sum().backward()
    factor = (w.numel() * high) ** -0.5 if scaled else 1.0
    torch.testing.assert_close(made.scale.grad.double(), s.grad * factor, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), v.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("observer", "arguments"),
    [
        (LSQObserver, {"dtype": torch.int8, "quant_min": -8, "quant_max": 7}),
        (
            MSEObserver,
            {
                "dtype": torch.uint8,
                "quant_min": 0,
                "quant_max": 15,
                "qscheme": torch.per_tensor_affine,
            },
        ),
    ],
)
def test_learning_when_it_runs_then_the_error_falls_and_qparams_are_those_used(observer, arguments):
    made = LearnableFakeQuantize(observer, use_grad_scaling=True, **arguments)
    x = data(400) * 2
    made(x)
    made.enable_range_learning()
    made.scale.data.mul_(1.6)
    optimizer = torch.optim.SGD(made.parameters(), 0.003)
    errors = []
    for _ in range(60):
        optimizer.zero_grad()
        error = (made(x) - x).square().sum()
        error.backward()
        optimizer.step()
        errors.append(error.item())
    assert errors[-1] < 0.9 * errors[0]
    scale, zero_point = made.calculate_qparams()
    low, high = arguments["quant_min"], arguments["quant_max"]
    expected = ((x / scale).round() + zero_point).clamp(low, high) - zero_point
    torch.testing.assert_close(made(x), expected * scale, rtol=1e-6, atol=1e-6)


def test_state_when_saved_then_it_loads():
    kinds = [LSQObserver(torch.int8, torch.per_channel_symmetric) for _ in range(2)]
    kinds[0](data(3, 5))
    kinds[1](data(3, 5, seed=1))
    kinds[1].load_state_dict(kinds[0].state_dict())
    for a, b in zip(kinds[0].calculate_qparams(), kinds[1].calculate_qparams(), strict=True):
        assert torch.equal(a, b)
