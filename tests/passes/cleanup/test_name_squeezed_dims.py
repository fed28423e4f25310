"""Squeezes name what they remove, and those that remove nothing are gone."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export

import pt2e_quant as pq
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.simpler_overloads import name_squeezed_dims

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
