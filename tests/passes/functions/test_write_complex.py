"""Calls with complex numbers are written as parts, or left as they are, island by island."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

import pt2e_quant as pq
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.functions.write_complex import operator_of, write_complex


def exported(function, x):
    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x)

    gm = torch.export.export(Module(), (x,)).module()
    assert isinstance(gm, GraphModule)
    return gm


def written(gm, has_kernel=lambda node: False):
    (record,) = run_passes(gm, (write_complex(has_kernel),))
    return [note.node for note in record.notes]


X = torch.linspace(-1, 1, 24).reshape(4, 6)


def test_write_complex_when_fired_then_a_second_run_changes_nothing():
    gm = exported(lambda x: torch.complex(x, x).abs(), X)
    assert len(written(gm)) == 1
    names = [name for n in gm.graph.nodes if (name := operator_of(n))]
    assert names == ["mul", "mul", "add", "sqrt"]
    assert written(gm) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.complex(x, x),
        lambda x: torch.complex(x, x).abs() + torch.complex(x, x).tan().real,
        lambda x: torch.cat([torch.complex(x, x), x]).abs(),
    ],
    ids=["a result", "no form", "a real part"],
)
def test_write_complex_when_a_call_cannot_be_written_then_its_island_is_left(function):
    gm = exported(function, X)
    written(gm)
    torch.testing.assert_close(gm(X), function(X))
    assert any(n.meta["val"].is_complex() for n in gm.graph.nodes if "val" in n.meta)


def test_write_complex_when_the_runtime_has_all_kernels_then_that_island_alone_is_left():
    gm = exported(lambda x: torch.fft.rfft(x).abs().sum() + torch.fft.fft(x).real, X)
    assert written(gm, lambda n: operator_of(n) in ("fft_rfft", "abs")) == ["fft_fft"]


class Rotary(nn.Module):
    """Attention whose positions are complex numbers in a buffer, behind a filter of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(16.0), torch.tensor([1.0, 0.1, 0.01, 0.001]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))
        self.project = nn.Linear(16, 16)
        self.filter = nn.Parameter(torch.randn(9, 2, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        pairs = torch.view_as_complex(self.project(x).reshape(batch, steps, 2, 4, 2))
        turned = torch.view_as_real(pairs * self.turns[:steps, None]).flatten(2)
        spectrum = torch.fft.rfft2(turned.unflatten(-1, (8, 2)).mT, dim=(-2, -1))
        return torch.fft.ifft(spectrum * self.filter[:5].T).real + turned[..., :5].unsqueeze(-2)


@pytest.mark.parametrize("name", ["xnnpack", "onnx"])
def test_artifact_when_a_model_computes_with_complex_numbers_then_as_its_graph_at_every_size(name):
    pytest.importorskip("executorch" if name == "xnnpack" else "onnxruntime")
    torch.manual_seed(0)
    calls = [torch.randn(size, steps, 16) for size, steps in ((2, 6), (1, 2), (4, 16), (2, 5))]
    shapes = ({0: Dim("batch", min=1, max=4), 1: Dim("steps", min=2, max=16)},)
    program = torch.export.export(Rotary().eval(), (calls[0],), dynamic_shapes=shapes)
    backend = pq.backends.get(name)
    prepared = pq.prepare_pt2e(program, backend.quantizer("int8"))
    pq.calibrate(prepared, [(x,) for x in calls], progress=False)
    graph = pq.convert_pt2e(prepared)
    artifact = backend.lower(graph)
    for x in (*calls, calls[0]):
        torch.testing.assert_close(artifact.run(x), graph(x), rtol=0, atol=0.1)
