import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pt2e_quant.training.int8_linear import (
    Int8TrainingConfig,
    convert_to_int8_training,
    int8_mm,
    quantize_rows,
)
from pt2e_quant.training.rounding import Rounding

NEAREST = Int8TrainingConfig(grad_rounding="nearest")


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("axis", [0, -1])
def test_quantize_rows_when_dequantized_then_error_is_half_a_step(axis):
    x = randn(9, 33)
    codes, scale = quantize_rows(x, axis, Rounding.NEAREST)
    assert scale.shape == ((9, 1) if axis == -1 else (1, 33))
    assert codes.abs().amax(axis).eq(127).all()
    assert ((codes * scale - x).abs() <= scale * 0.5001).all()


def test_int8_linear_when_trained_then_its_three_products_are_those_of_integers():
    module = convert_to_int8_training(nn.Linear(33, 12, bias=False), NEAREST)
    x = randn(7, 33).requires_grad_()
    grad = randn(7, 12, seed=1)
    y = module(x)
    y.backward(grad)

    def product(left, right):
        a, a_scale = quantize_rows(left, -1, Rounding.NEAREST)
        b, b_scale = quantize_rows(right, 0, Rounding.NEAREST)
        return (a.double() @ b.double()) * a_scale * b_scale

    weight = module.weight.detach()
    for found, left, right in (
        (y, x.detach(), weight.t()),
        (x.grad, grad, weight),
        (module.weight.grad, grad.t(), x.detach()),
    ):
        torch.testing.assert_close(found.double(), product(left, right), rtol=1e-6, atol=1e-7)


def test_int8_linear_when_gradients_are_stochastic_then_right_on_average():
    torch.manual_seed(0)
    module = convert_to_int8_training(nn.Linear(8, 4, bias=False))
    float_gradients = Int8TrainingConfig(quantize_grad_input=False, quantize_grad_weight=False)
    plain = convert_to_int8_training(nn.Linear(8, 4, bias=False), float_gradients)
    with torch.no_grad():
        plain.weight.copy_(module.weight)
    x, grad = randn(16, 8), randn(16, 4, seed=1)
    plain(x).backward(grad)
    runs = 400
    for _ in range(runs):
        module(x).backward(grad / runs)
    error = (module.weight.grad - plain.weight.grad).norm() / plain.weight.grad.norm()
    assert error < 0.01


def test_int8_linear_when_compiled_then_equal_to_eager_to_the_bit():
    module = convert_to_int8_training(nn.Linear(33, 12), NEAREST)
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager")
    x = randn(2, 7, 33)
    module(x).square().sum().backward()
    compiled(x).square().sum().backward()
    assert torch.equal(module.weight.grad, compiled.weight.grad)


def test_int8_linear_when_checkpointed_or_under_autocast_then_it_trains_alike():
    module = convert_to_int8_training(nn.Linear(33, 12), NEAREST)
    x = randn(7, 33)

    def gradient(run):
        module.zero_grad()
        run(x).float().square().sum().backward()
        return module.weight.grad.clone()

    expected = gradient(module)
    assert torch.equal(gradient(lambda x: checkpoint(module, x, use_reentrant=False)), expected)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
        found = gradient(module)
    assert y.dtype == torch.bfloat16
    # a step of bfloat16 and one of int8
    assert (found - expected).norm() < (2**-8 + 2**-7) * 3 * expected.norm()


def test_int8_mm_when_given_integers_then_exact():
    left = torch.full((3, 2000), -127, dtype=torch.int8)
    assert int8_mm(left, left.t().contiguous()).unique().tolist() == [127 * 127 * 2000]


def test_linear_when_a_batch_has_no_rows_then_trains():
    model = convert_to_int8_training(nn.Sequential(nn.Linear(64, 32)))
    x = torch.empty(0, 64, requires_grad=True)
    model(x).sum().backward()
    assert x.grad.shape == (0, 64)
    assert not model[0].weight.grad.any()
