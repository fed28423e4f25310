"""Learned ranges of a prepared graph under `torch.compile`, from the first batch on."""

import copy

import pytest
import torch
from qat_nets import QatQuantizer
from torch import nn

import pt2e_quant as pq
from pt2e_quant.observers.training.learnable_fake_quantize import enable_range_learning

X = torch.randn(8, 128, generator=torch.Generator().manual_seed(1))


def train(run, model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = run(X).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("observer", [pq.LSQObserver, pq.MSEObserver])
def test_learned_range_when_prepared_then_trains_compiled_from_the_first_batch(observer):
    learns, weights = (
        pq.LearnableFakeQuantize.with_args(observer=kind, use_grad_scaling=True)
        for kind in (observer, pq.LSQObserver)
    )
    float_model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))
    program = torch.export.export(float_model.train(), (X,))
    model = pq.prepare_qat_pt2e(program, QatQuantizer(weights, learns, weight_range=(-8, 7)))
    eager = copy.deepcopy(model)
    for made in (model, eager):
        made.apply(enable_range_learning)
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    scales = [p for name, p in model.named_parameters() if name.endswith(".scale")]
    assert len(scales) == 5
    assert all(p.isnan().all() for p in scales)
    assert train(run, model, 3) == train(eager, eager, 3)
    assert all(p.isfinite().all() for p in scales)
    for key, value in eager.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
