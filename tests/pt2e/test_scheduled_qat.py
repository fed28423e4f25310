"""Freezing by the number of steps, in a plain loop and after a checkpoint."""

import pytest
import torch
from qat_nets import QatQuantizer, settled
from torch import nn

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.flow.qat.numerics import QatSchedule
from pt2e_quant.flow.qat.prepare_qat_pt2e import prepare_qat_pt2e
from pt2e_quant.observers.training.learnable_fake_quantize import LearnableFakeQuantize
from pt2e_quant.observers.training.learned_step import LSQObserver

X = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def prepared(quantizer=None, seed=0):
    torch.manual_seed(seed)
    model = settled(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())).train()
    return prepare_qat_pt2e(torch.export.export(model, (X,)), quantizer or QatQuantizer())


def state(model, part):
    return {k: v.clone() for k, v in model.state_dict().items() if part in k}


def same(a, b):
    return all(torch.equal(a[k], b[k]) for k in a)


def test_schedule_when_steps_pass_then_each_part_freezes_after_its_own():
    model = prepared()
    schedule = QatSchedule(model, freeze_observers_after=2, freeze_bn_after=3)
    seen = []
    for step in range(5):
        before = state(model, "min_val"), state(model, "running_mean")
        model(X * (1 + step))
        schedule.step()
        after = state(model, "min_val"), state(model, "running_mean")
        seen.append(tuple(same(b, a) for b, a in zip(before, after, strict=True)))
    moving, frozen = False, True
    assert seen == [
        (moving, moving),
        (moving, moving),
        (frozen, moving),
        (frozen, frozen),
        (frozen, frozen),
    ]
    model.train()
    model(X)
    assert same(after[1], state(model, "running_mean"))


def test_schedule_when_resumed_then_frozen_as_before():
    one, two = prepared(), prepared(seed=1)
    schedule = QatSchedule(one, freeze_observers_after=1, freeze_bn_after=2)
    for _ in range(3):
        one(X)
        schedule.step()
    resumed = QatSchedule(two, freeze_observers_after=1, freeze_bn_after=2)
    two.load_state_dict(one.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    before = state(two, "")
    assert torch.equal(two(X * 2), one(X * 2))
    assert same(before, state(two, ""))


def test_schedule_when_ranges_are_learned_then_scales_train_from_the_papers_step():
    constructor = LearnableFakeQuantize.with_args(observer=LSQObserver, use_grad_scaling=True)
    model = prepared(QatQuantizer(constructor, constructor, weight_range=(-8, 7)))
    schedule = QatSchedule(model, learn_ranges_after=1)
    model(X)
    assert not [n for n, p in model.named_parameters() if n.endswith("scale") and p.requires_grad]
    schedule.step()
    learned = {n: p for n, p in model.named_parameters() if n.endswith(".scale")}
    assert len(learned) == 3
    start = {n: p.detach().clone() for n, p in learned.items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    assert all(p.requires_grad for p in learned.values())
    assert not any(torch.equal(p, start[n]) for n, p in learned.items())


@pytest.mark.parametrize("wrong", [{"freeze_bn_after": -1}, {"learn_ranges_after": 0}])
def test_schedule_when_impossible_then_refused(wrong):
    with pytest.raises(ConfigError):
        QatSchedule(nn.Linear(1, 1), **wrong)
