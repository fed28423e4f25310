"""Runs on converted graphs whose weights are still float (`fold_quantize=False`)."""

import pytest
import torch
from torch import nn
from torch.export import export

import pt2e_quant as pq
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.graph.show import show
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.weights.store_weights import store_weights


@pytest.fixture
def unfolded(plain_backend):
    def convert(model, x):
        prepared = pq.prepare_pt2e(export(model.eval(), (x,)), plain_backend.quantizer())
        pq.calibrate(prepared, [x])
        return pq.convert_pt2e(prepared, fold_quantize=False)

    torch.manual_seed(0)
    return convert


def test_constant_when_quantized_then_stored_as_integers(unfolded):
    model, x = nn.Sequential(nn.Linear(4, 3, bias=False)), torch.randn(2, 4)
    gm = unfolded(model, x)
    expected = gm(x)
    (record,) = run_passes(gm, (store_weights,))
    assert [n.text for n in record.notes] == ["0.weight: 48 -> 48 bytes"]
    assert "quantize_per_channel(0.weight," not in show(gm).replace("de", "")
    assert "dequantize_per_channel(0.weight_q, 0.weight_scale" in show(gm)
    stored = gm.get_buffer("0.weight_q")
    assert stored.dtype is torch.int8
    scale = gm.get_buffer("0.weight_scale")
    torch.testing.assert_close(stored * scale[:, None], model[0].weight, atol=0.01, rtol=0)
    assert torch.equal(gm(x), expected)
    weight = provenance_of(gm).tensor("0.weight")
    # 12 float32 values; 12 bytes of integers, and a scale and a zero_point for 3 channels
    assert (weight.size_before, weight.size_after) == (48, 12 + 3 * (4 + 8))


def test_store_weights_when_run_twice_then_the_second_changes_nothing(unfolded):
    gm = unfolded(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4))
    run_passes(gm, (store_weights,))
    text = show(gm)
    (record,) = run_passes(gm, (store_weights,))
    assert not record.changed
    assert show(gm) == text


def test_activation_when_weights_are_stored_then_its_quantize_stays(unfolded):
    gm = unfolded(nn.Sequential(nn.Linear(4, 3)), torch.randn(2, 4))
    before = show(gm).count("quantize_per_tensor")
    run_passes(gm, (store_weights,))
    assert show(gm).count("quantize_per_tensor") == before > 0


def test_weights_when_tied_then_stored_once_and_the_users_are_kept(unfolded):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            self.second = nn.Linear(4, 4, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.relu(self.first(x)))

    model, x = Tied(), torch.randn(2, 4)
    kept = model.first.weight.detach().clone()
    gm = unfolded(model, x)
    run_passes(gm, (store_weights, drop_dead_constants))
    integers = [t for t in gm.state_dict().values() if t.dtype is torch.int8]
    assert len(integers) == 1
    assert torch.equal(model.first.weight, kept)
    assert not any(t.shape == (4, 4) and t.is_floating_point() for t in gm.state_dict().values())
