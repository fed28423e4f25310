import copy

import pytest
import torch
from torch import nn

from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.training.optimizers.low_bit_optimizers import (
    AdamW4bit,
    AdamW8bit,
    SGD4bit,
    SGD8bit,
    state_bytes,
)

ADAM = {"lr": 3e-3, "weight_decay": 0.1}
SGD = {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
PAIRS = (
    (AdamW8bit, torch.optim.AdamW, ADAM),
    (AdamW4bit, torch.optim.AdamW, ADAM),
    (SGD8bit, torch.optim.SGD, SGD),
    (SGD4bit, torch.optim.SGD, SGD),
)


def fit(optimizer_class, options, steps, width=64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, width))
    x = torch.randn(64, width)
    y = (x @ torch.randn(width, width)).tanh()
    optimizer = optimizer_class(model.parameters(), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    return model, optimizer, loss.item()


@pytest.mark.parametrize(("own", "theirs", "options"), PAIRS)
@pytest.mark.parametrize("maximize", [False, True])
def test_optimizer_when_parameters_are_small_then_equal_to_torch(own, theirs, options, maximize):
    """Small states stay float32, so that only the arithmetic is compared."""
    options = options | {"maximize": maximize}
    found, _, _ = fit(own, options, 5, width=8)
    expected, _, _ = fit(theirs, options, 5, width=8)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("own", "theirs", "options"), PAIRS)
def test_optimizer_when_states_are_quantized_then_it_learns_in_the_memory_promised(
    own, theirs, options
):
    _, optimizer, loss = fit(own, options, 60)
    _, other, expected = fit(theirs, options, 60)
    untrained = fit(theirs, options, 1)[2]
    # of what torch gains, 8 bits gain 95 % and 4 bits 85 %
    assert untrained - loss > (0.95 if own.bits == 8 else 0.85) * (untrained - expected)
    moments = 2 if theirs is torch.optim.AdamW else 1
    # codes, a float32 scale for each row (shorter than a block), and float32 biases
    codes = 2 * 64 * 128 * own.bits // 8
    blocks = 128 + 64
    steps = 4 * 4 if theirs is torch.optim.AdamW else 0
    assert state_bytes(optimizer) == moments * (codes + 4 * blocks + 4 * (128 + 64)) + steps
    assert state_bytes(other) == moments * 4 * (2 * 64 * 128 + 128 + 64) + steps


@pytest.mark.parametrize(("own", "theirs", "options"), PAIRS)
def test_optimizer_when_its_state_is_loaded_then_training_goes_on_equal_to_the_bit(
    own, theirs, options
):
    model, optimizer, _ = fit(own, options, 3)
    for dtype in (torch.float32, torch.bfloat16):
        other = copy.deepcopy(model).to(dtype)
        loaded = own(other.parameters(), **options)
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            kept, found = optimizer.state[one], loaded.state[two]
            assert kept.keys() == found.keys()
            for name, value in kept.items():
                assert found[name].dtype == value.dtype
                assert torch.equal(found[name], value)


def test_optimizer_when_parameters_are_bfloat16_then_stochastic_rounding_keeps_small_steps():
    options = {"lr": 1e-4, "weight_decay": 0.0}
    moved = {}
    for rounding in ("nearest", "stochastic"):
        torch.manual_seed(0)
        param = nn.Parameter(torch.full((64, 64), 1.0, dtype=torch.bfloat16))
        optimizer = AdamW8bit([param], rounding=rounding, **options)
        for _ in range(50):
            param.grad = torch.ones_like(param)
            optimizer.step()
        moved[rounding] = 1.0 - param.float().mean().item()
    assert moved["nearest"] == 0.0
    assert moved["stochastic"] == pytest.approx(50 * 1e-4, rel=0.1)


def test_optimizer_when_options_are_wrong_then_it_refuses():
    params = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(ConfigError, match="amsgrad"):
        AdamW8bit(params, amsgrad=True)
    with pytest.raises(ConfigError, match="lr is a number of at least 0"):
        SGD8bit(params, lr=-1.0)
    with pytest.raises(ConfigError, match="betas"):
        AdamW4bit(params, betas=(0.9, 1.0))
    with pytest.raises(ConfigError, match="nesterov"):
        SGD4bit(params, nesterov=True)


def test_optimizer_when_gradients_are_sparse_then_it_refuses():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse"):
        SGD8bit(table.parameters(), lr=0.1).step()


def test_optimizer_when_a_scheduler_sets_lr_then_it_counts():
    param = nn.Parameter(torch.ones(1))
    optimizer = SGD8bit([param], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    for expected in (0.0, -0.1):
        param.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
        assert param.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("wrong", [3, None, torch.nn.Linear(2, 2), {}])
def test_state_bytes_when_given_no_optimizer_then_error_says_what_it_takes(wrong) -> None:
    with pytest.raises(ConfigError, match=f"an optimizer, found {type(wrong).__name__}"):
        state_bytes(wrong)


@pytest.mark.parametrize("optimizer_class", [pair[0] for pair in PAIRS])
@pytest.mark.parametrize("way", ["foreach", "fused", "capturable", "differentiable"])
def test_options_of_torchs_steps_when_given_then_taken_off_and_refused_on(optimizer_class, way):
    weights = [nn.Parameter(torch.randn(64, 128))]
    optimizer_class(weights, lr=0.1, **{way: False})
    with pytest.raises(ConfigError, match=f"leave {way} out"):
        optimizer_class(weights, lr=0.1, **{way: True})
    with pytest.raises(ConfigError, match='no option "weight_decays"'):
        optimizer_class(weights, lr=0.1, weight_decays=0.1)


@pytest.mark.parametrize("optimizer_class", [pair[0] for pair in PAIRS])
def test_odd_parameters_when_stepped_then_trained_or_left(optimizer_class):
    shapes = ((), (0, 4), (64, 128))
    scalar, empty, unused = (nn.Parameter(torch.ones(shape)) for shape in shapes)
    optimizer = optimizer_class([scalar, empty, unused], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (scalar * 2 + empty.sum()).backward()
        optimizer.step()
    assert scalar < 1
    assert torch.equal(unused, torch.ones(64, 128))
