"""Max pools that give places which nobody reads."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.graph.ops import aten
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.simpler_overloads import drop_unread_places
from pt2e_quant.passes.cleanup.strip_guards import strip_guards

X = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))


class Pools(nn.Module):
    def __init__(self, reads_places=False):
        super().__init__()
        self.conv, self.reads_places = nn.Conv2d(4, 4, 1), reads_places

    def forward(self, x):
        values, places = functional.max_pool2d(self.conv(x), 2, return_indices=True)
        return functional.max_unpool2d(values, places, 2) if self.reads_places else values


def graph(model):
    gm = torch.export.export(model.eval(), (X,)).module()
    run_passes(gm, (strip_guards,))
    return gm


def test_pool_when_its_places_are_unread_then_it_gives_none():
    gm = graph(Pools())
    expected = gm(X)
    assert drop_unread_places(gm).changed
    assert torch.equal(gm(X), expected)
    targets = [n.target for n in gm.graph.nodes]
    assert aten.max_pool2d.default in targets
    assert aten.max_pool2d_with_indices.default not in targets
    assert not drop_unread_places(gm).changed


def test_pool_when_its_places_are_read_then_it_stays():
    result = drop_unread_places(graph(Pools(reads_places=True)))
    assert [note.text for note in result.notes] == ["its places are read"]
    assert not result.changed


@pytest.mark.parametrize("prepare", [pq.prepare_pt2e, pq.prepare_qat_pt2e])
def test_integer_quantizer_when_places_are_unread_then_none_is_float(prepare):
    prepared = prepare(torch.export.export(Pools().eval(), (X,)), pq.IntegerQuantizer())
    prepared(X)
    assert pq.audit(pq.convert_pt2e(prepared)).is_integer_only
