"""Operators with a factor for each channel, trained through the target's integers."""

import copy

import pytest
import torch
from numerics_nets import X, assert_exact
from torch import nn

import pt2e_quant as pq
from pt2e_quant.observers.training.fake_quantize import disable_observer
from pt2e_quant.passes.batch_norm.trained_batch_norm import freeze_bn_stats


class PreActivated(nn.Module):
    """Norms in front of convolutions, which none can be folded into; slopes that are trained."""

    def __init__(self, norm):
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.PReLU(8, init=-0.2)
        self.norm = norm
        self.conv = nn.Conv2d(8, 5, 1)

    def forward(self, x):
        y = self.act(self.stem(x))
        return self.conv(torch.relu(self.norm(y)) + y).mean((2, 3))


NORMS = {
    "batch": lambda: nn.BatchNorm2d(8),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "group": lambda: nn.GroupNorm(4, 8),
}


@pytest.mark.parametrize("name", list(NORMS))
def test_integers_when_norms_stand_alone_then_all_train_and_convert_is_equal(name):
    torch.manual_seed(0)
    ep = torch.export.export(PreActivated(NORMS[name]()).train(), (X,))
    prepared = pq.prepare_qat_pt2e(ep, pq.IntegerQuantizer(), numerics="integer")
    optimizer = torch.optim.SGD(prepared.parameters(), 0.05)
    losses = []
    for step in range(6):
        if step == 3:
            prepared.apply(disable_observer).apply(freeze_bn_stats)
        optimizer.zero_grad()
        loss = (prepared(X) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    slopes = dict(prepared.named_parameters())["act.weight"]
    assert bool((slopes.grad != 0).any())
    assert not [n for n in pq.provenance_of(prepared).notes if "no integer form" in n]
    assert pq.audit(pq.convert_pt2e(copy.deepcopy(prepared))).is_integer_only
    assert_exact(prepared)
