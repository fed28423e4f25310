"""Training through integers with dropouts, which inference does not have."""

import pytest
import torch
from numerics_nets import assert_exact
from torch import nn

import pt2e_quant as pq
from pt2e_quant.observers.training.fake_quantize import disable_observer
from pt2e_quant.passes.reference.integer_forward import IntegerForward


class Dropped(nn.Module):
    """Dropouts before, behind and between operators with an integer form."""

    def __init__(self, probability=0.5):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(probability)

    def forward(self, x):
        x = torch.relu(self.drop(self.first(x)))
        return self.second(self.drop(x).mean(1))


@pytest.mark.parametrize("profile", ["default", "tflite", "tosa_double"])
def test_dropout_when_before_an_operator_then_integers_in_inference_alone(profile, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(16, 10, 6)
    ep = torch.export.export(Dropped().train(), (x,))
    prepared = pq.prepare_qat_pt2e(ep, pq.IntegerQuantizer(), numerics="integer", profile=profile)
    assert {"mean", "linear", "linear_1"} <= set(pq.numerics_of(prepared))
    assert not any("mean" in note for note in pq.provenance_of(prepared).notes)
    optimizer = torch.optim.SGD(prepared.parameters(), 0.05)
    for _ in range(3):
        prepared(x).square().sum().backward()
        optimizer.step()
    pq.save(prepared, tmp_path / "prepared.ptq")
    prepared = pq.load(tmp_path / "prepared.ptq")
    modules = {m.name: m for m in prepared.modules() if isinstance(m, IntegerForward)}
    # What a dropout leaves is no integer times the scale.
    assert not modules["mean"].is_integer
    assert modules["linear_1"].is_integer
    assert_exact(prepared, profile, x)


def test_dropout_when_switched_to_integers_in_eval_then_exact():
    torch.manual_seed(0)
    x = torch.randn(16, 10, 6)
    ep = torch.export.export(Dropped().train(), (x,))
    prepared = pq.prepare_qat_pt2e(ep, pq.IntegerQuantizer())
    prepared(x)
    prepared.eval()
    pq.set_numerics(prepared, "integer")
    assert_exact(prepared, x=x)


def test_dropout_when_it_never_drops_then_training_is_in_integers_throughout():
    torch.manual_seed(0)
    x = torch.randn(16, 10, 6)
    ep = torch.export.export(Dropped(0.0).train(), (x,))
    prepared = pq.prepare_qat_pt2e(ep, pq.IntegerQuantizer(), numerics="integer")
    prepared(x)
    prepared.apply(disable_observer)
    modules = [m for m in prepared.modules() if isinstance(m, IntegerForward)]
    assert all(module.is_integer for module in modules)
    assert torch.equal(prepared.train()(x), prepared.eval()(x))
    assert_exact(prepared, x=x)
