"""Fake-quantizes whose forward pass a backward pass runs again."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pt2e_quant.observers.static.moving_average import MovingAverageMinMaxObserver
from pt2e_quant.observers.training.fake_quantize import FakeQuantize
from pt2e_quant.observers.training.fused_fake_quantize import FusedMovingAvgObsFakeQuantize
from pt2e_quant.observers.training.learnable_fake_quantize import LearnableFakeQuantize
from pt2e_quant.pt2e.fake_quantize import default_affine_fake_quant

GIVEN = {"quant_min": -8, "quant_max": 7, "dtype": torch.int8}
MADE = {
    "plain": lambda: FakeQuantize(MovingAverageMinMaxObserver, **GIVEN),
    "fused": lambda: FusedMovingAvgObsFakeQuantize(MovingAverageMinMaxObserver, **GIVEN),
    "learnable": lambda: LearnableFakeQuantize(MovingAverageMinMaxObserver, **GIVEN),
    "affine": default_affine_fake_quant,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(MADE))
def test_fake_quantize_when_checkpointed_then_observes_once(name, dtype):
    plain = MADE[name]()
    recomputed = copy.deepcopy(plain)
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        x = (torch.randn(6, 32, generator=generator) * (1 + step)).to(dtype).requires_grad_()
        (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
        y = checkpoint(lambda v: recomputed(v).square(), x, use_reentrant=False)
        (found,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(found, expected)
    for (key, a), b in zip(
        plain.state_dict().items(), recomputed.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), key
