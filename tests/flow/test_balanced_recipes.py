"""Recipes without data even out channels, unless they are told not to or train."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pt2e_quant as pq
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.calibrate.sample import sqnr_db


class GatedBlock(nn.Module):
    """A pre-norm gated MLP with a few wide value rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate, self.up = (nn.Linear(64, 128, bias=False) for _ in range(2))
        self.down = nn.Linear(128, 64, bias=False)
        with torch.no_grad():
            self.up.weight[:4] *= 12
            self.down.weight[:, :4] /= 12

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


X = torch.randn(1, 16, 64, generator=torch.Generator().manual_seed(3))
HELD_OUT = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(4)).split(1)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return GatedBlock().eval()


def quantized(model, backend: str, recipe: str, *, balanced: bool = True):
    quantizer = pq.backends.get(backend).quantizer(recipe)
    if not balanced:
        quantizer.remove_algorithm("balance_channels")
    return pq.convert_pt2e(pq.prepare_pt2e(torch.export.export(model, (X,)), quantizer))


def quality(model, gm) -> float:
    with torch.no_grad():
        # of what is quantized: the residual would hide it
        return sqnr_db([model(x) - x for x in HELD_OUT], [gm(x) - x for x in HELD_OUT])


@pytest.mark.parametrize("backend", ["xnnpack", "onnx"])
def test_int8_dynamic_when_balanced_then_3_db_nearer_and_on_record(model, backend):
    kept = copy.deepcopy(model.state_dict())
    gm = quantized(model, backend, "int8_dynamic")
    plain = quantized(model, backend, "int8_dynamic", balanced=False)
    assert quality(model, gm) > quality(model, plain) + 3
    assert "balance_channels" in provenance_of(gm).passes
    assert "balance_channels" not in provenance_of(plain).passes
    assert any("less error expected" in note for note in provenance_of(gm).notes)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def test_static_recipe_when_linears_have_calibrated_ranges_then_not_balanced():
    assert "balance_channels" not in {
        a.name for a in pq.backends.get("onnx").quantizer("int8").algorithms
    }
    # For XNNPACK it evens out the inputs of linears that take their scales at run time.
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()
    quantizer = pq.backends.get("xnnpack").quantizer("int8")
    prepared = pq.prepare_pt2e(torch.export.export(model, (X,)), quantizer)
    gm = pq.convert_pt2e(pq.calibrate(prepared, [(X,)], progress=False))
    assert "balance_channels" not in provenance_of(gm).passes


def test_training_when_prepared_then_starts_from_the_users_weights(model):
    quantizer = pq.backends.get("xnnpack").quantizer("int8_dynamic").for_qat()
    assert quantizer.algorithms == ()
