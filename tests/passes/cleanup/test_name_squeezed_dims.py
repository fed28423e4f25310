"""Squeezes name what they remove, and those that remove nothing are gone."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import pt2e_quant as pq
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.simpler_overloads import (
    keep_squeezed_ranks,
    name_squeezed_dims,
)

aten = torch.ops.aten


class _Squeezes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.squeeze().squeeze(0)).squeeze(-1)


def graph_of(model=None):
    shapes = {"x": {1: Dim("s", min=1, max=16)}}
    return export(
        (model or _Squeezes()).eval(), (torch.ones(1, 4, 1, 8),), dynamic_shapes=shapes
    ).module()


def squeezes_of(gm):
    return [(n.target, n.args[1:]) for n in gm.graph.nodes if "squeeze" in str(n.target)]


def test_squeezes_when_named_then_the_captured_dims_and_the_idle_ones_are_gone():
    gm = graph_of()
    assert len(squeezes_of(gm)) == 3
    assert run_passes(gm, (name_squeezed_dims,))[0].changed
    assert squeezes_of(gm) == [(aten.squeeze.dims, ([0, 2],))]
    x = torch.randn(1, 5, 1, 8)
    assert gm(x).shape == (5, 8)
    assert gm(x[:, :1]).shape == (1, 8)


def test_squeezes_when_named_again_then_nothing_changes_and_the_reason_is_told():
    gm = graph_of()
    run_passes(gm, (name_squeezed_dims,))
    record = run_passes(gm, (name_squeezed_dims,))[0]
    assert not record.changed
    assert [note.text for note in record.notes] == ["it names them"]


def test_squeezes_when_sizes_vary_then_those_that_may_remove_more_are_named():
    gm = graph_of()
    assert run_passes(gm, (keep_squeezed_ranks,))[0].changed
    assert squeezes_of(gm)[0] == (aten.squeeze.dims, ([0, 2],))
    assert (aten.squeeze.dim, (-1,)) in squeezes_of(gm)
    assert gm(torch.randn(1, 1, 1, 8)).shape == (1, 8)
    record = run_passes(gm, (keep_squeezed_ranks,))[0]
    assert not record.changed
    assert {note.text for note in record.notes} == {"it removes the same at every size"}


class _NormBehindSqueeze(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.conv = nn.Conv1d(5, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(torch.relu(self.norm(x.squeeze())))


@pytest.mark.parametrize("prepare", [pq.prepare_pt2e, pq.prepare_qat_pt2e])
def test_norm_when_a_squeeze_stands_before_it_then_runs_at_size_one(prepare):
    pytest.importorskip("executorch")
    shapes = {"x": {3: Dim("s", min=1, max=9)}}
    model = _NormBehindSqueeze().eval()
    model.norm.running_mean += torch.arange(5)
    exported = export(model, (torch.ones(1, 4, 5, 8),), dynamic_shapes=shapes)
    prepared = prepare(exported, pq.backends.get("xnnpack").quantizer("int8"))
    x = torch.randn(1, 4, 5, 1)
    pq.calibrate(prepared, [x], progress=False)
    y = pq.convert_pt2e(prepared)(x)
    assert pq.sqnr_db(model.conv(torch.relu(model.norm(x[0]))), y) > 25


@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
def test_model_when_it_squeezes_what_is_not_one_then_runs_at_every_size(backend):
    pytest.importorskip({"onnx": "onnxruntime", "xnnpack": "executorch"}[backend])
    torch.manual_seed(0)
    model, x = _Squeezes().eval(), torch.randn(1, 4, 1, 8)
    artifact = pq.quantize(
        model,
        (x,),
        dynamic_shapes={"x": {1: Dim("s", min=1, max=16)}},
        calibration_data=[x],
        backend=backend,
        progress=False,
    )
    for size in (16, 2, 4):
        y = torch.randn(1, size, 1, 8).clamp(-1, 1)
        assert pq.sqnr_db(model(y), artifact.run(y)) > 25
    assert artifact.run(x[:, :1]).shape == (1, 8)
