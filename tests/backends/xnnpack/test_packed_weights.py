"""Packed weights: delegated as unpacked ones are; tied weights are stored once."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack import lower
from pt2e_quant.backends.xnnpack.artifact import XnnpackArtifact
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.schemes import INT8_WEIGHT
from pt2e_quant.core.unpack_op import is_unpack
from pt2e_quant.graph.pipeline import PassResult, graph_pass


class Mlp(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(128, 128), nn.Linear(128, 128)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


def prepared(model: nn.Module, bits: int) -> torch.fx.GraphModule:
    high = 2 ** (bits - 1) - 1
    quantizer = BACKEND.quantizer("int8_minmax")
    scheme = quantizer.scheme
    weight = replace(INT8_WEIGHT, quant_min=-high, quant_max=high)
    quantizer.set_global(replace(scheme, name=f"a8w{bits}", weight=weight))
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
    gm = pq.prepare_pt2e(torch.export.export(model.eval(), (x,)), quantizer)
    return pq.calibrate(gm, [(x,)], progress=False)


def lowered(gm: torch.fx.GraphModule) -> XnnpackArtifact:
    return BACKEND.lower(gm, verify=False)


@pytest.mark.parametrize("bits", [2, 4, 5])
def test_lower_when_packed_then_the_delegates_of_unpacked_ones(bits):
    torch.manual_seed(0)
    model = Mlp()
    packed = pq.convert_pt2e(prepared(model, bits))
    plain = pq.convert_pt2e(prepared(model, bits), pack=False)
    assert any(is_unpack(n) for n in packed.graph.nodes)
    assert not any(is_unpack(n) for n in plain.graph.nodes)
    a, b = lowered(packed), lowered(plain)
    assert [list(map(str, d)) for d in a.contents().delegates] == [
        list(map(str, d)) for d in b.contents().delegates
    ]
    assert a.contents().integer_ops()["FullyConnected"] == 2
    assert a.contents().kernels == b.contents().kernels
    x = torch.randn(4, 128)
    assert torch.equal(a.run(x), b.run(x))
    # The canonical graph holds its packed weights still.
    assert any(is_unpack(n) for n in packed.graph.nodes)
    pq.verify_canonical(packed)


def test_lower_when_not_unpacked_first_then_executorch_misreads_the_weight(monkeypatch):
    """Why every lowering begins with unpack_weights."""

    @graph_pass(needs=(), gives=())
    def leave(gm):
        return PassResult(False)

    packed = pq.convert_pt2e(prepared(Mlp(), 4))
    monkeypatch.setattr(lower, "unpack_weights", leave)
    # ExecuTorch takes the packed bytes for the weight itself and fails; float saves nothing.
    with pytest.raises(UnsupportedError, match="no less than the float constants"):
        lowered(packed)


def test_lower_when_tied_then_the_weight_is_in_the_file_once():
    sizes = {}
    for tied in (True, False):
        torch.manual_seed(0)
        gm = pq.convert_pt2e(prepared(Mlp(tied=tied), 8))
        weights = [t for t in gm.state_dict().values() if t.numel() == 128 * 128]
        assert len(weights) == 2 - tied
        sizes[tied] = lowered(gm).size_bytes
    assert sizes[False] - sizes[True] > 0.95 * 128 * 128
