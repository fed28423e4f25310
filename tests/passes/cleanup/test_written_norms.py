"""Layer norms are found as models write them, over any axis, and other quotients stay."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pt2e_quant as pq
from pt2e_quant.passes.cleanup.written_norms import name_norms
from tests.call_function import Call

X = torch.randn(2, 6, 4, 5, generator=torch.Generator().manual_seed(0)) * 3 + 1
EPS = 1e-5


def convnext(x, dim=1):
    u = x.mean(dim, keepdim=True)
    s = (x - u).pow(2).mean(dim, keepdim=True)
    return (x - u) / torch.sqrt(s + EPS)


def shared(x, dim=1):
    centered = x - x.mean(dim, keepdim=True)
    return centered * torch.rsqrt((centered * centered).mean(dim, keepdim=True) + EPS)


def by_variance(x, dim=1):
    deviation = (x.var(dim, keepdim=True, unbiased=False) + EPS).sqrt()
    return (x - x.mean(dim, keepdim=True)) / deviation


WRITTEN = {f.__name__: f for f in (convnext, shared, by_variance)}
OTHERS = {
    "number": lambda x: (x - x.mean(1, True)) / 2.0 + 0.5 * (x - 1.0),
    "scaled": lambda x: (x - x.mean(1, True)) / ((2.0 * x).mean(1, True) + EPS).sqrt(),
    "no_mean": lambda x: (x - 1.0) / (x.var(1, False, True) + EPS).sqrt(),
    "unbiased": lambda x: (x - x.mean(1, True)) / (x.var(1, keepdim=True) + EPS).sqrt(),
    "other_axis": lambda x: (x - x.mean(1, True)) / (x.var(2, False, True) + EPS).sqrt(),
    "of_another": lambda x: (x - x.mean(1, True)) / ((x + 1).var(1, False, True) + EPS).sqrt(),
    "rms_of_another": lambda x: x / ((x + 1).pow(2).mean(1, True) + EPS).sqrt(),
    "mean_of_product": lambda x: x / ((x * 2).mean(1, True) + EPS).sqrt(),
    "rms_of_image": lambda x: x / (x.pow(2).mean((2, 3), True) + EPS).sqrt(),
    "no_root": lambda x: (x - x.mean(1, True)) / (x.var(1, False, True) + EPS),
    "rows_and_channels": lambda x: (
        (x - x.mean((1, 2), True)) / (x.var((1, 2), False, True) + EPS).sqrt()
    ),
    "cube": lambda x: (
        (x - x.mean(1, True)) / ((x - x.mean(1, True)).pow(4).mean(1, True) + EPS).sqrt()
    ),
}


def captured(function):
    return torch.export.export(Call(function), (X,)).module(check_guards=False)


def names(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("name", WRITTEN)
@given(dim=st.integers(-4, 3))
def test_norm_when_written_out_then_a_layer_norm(name, dim):
    gm = captured(lambda x: WRITTEN[name](x, dim))
    assert name_norms(gm).changed
    assert names(gm).count("aten.layer_norm.default") == 1
    expected = F.layer_norm(X.movedim(dim, -1), (X.shape[dim],), eps=EPS).movedim(-1, dim)
    torch.testing.assert_close(gm(X), expected)


@pytest.mark.parametrize(
    "written",
    [
        lambda x: x / (x.pow(2).mean(1, keepdim=True) + EPS).sqrt(),
        lambda x: torch.rsqrt((x * x).mean(1, True) + EPS) * x,
        lambda x: x * torch.rsqrt(x.square().mean(-3, True) + EPS),
    ],
)
def test_norm_when_by_the_mean_of_squares_of_channels_then_an_rms_norm(written):
    gm = captured(written)
    assert name_norms(gm).changed
    assert names(gm).count("aten.rms_norm.default") == 1
    torch.testing.assert_close(gm(X), written(X))


def test_norm_when_by_the_mean_of_squares_of_the_last_axis_then_left_to_idioms():
    gm = captured(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, True) + EPS))
    assert not name_norms(gm).changed


@pytest.mark.parametrize("written", WRITTEN.values())
@pytest.mark.parametrize("dims", [(2, 3), (3, 2), (-2, -1)])
def test_norm_when_of_rows_and_columns_then_an_instance_norm(written, dims):
    gm = captured(lambda x: written(x, dims))
    assert name_norms(gm).changed
    assert names(gm) == ["aten.instance_norm.default"]
    torch.testing.assert_close(gm(X), F.instance_norm(X, eps=EPS))


@pytest.mark.parametrize("name", OTHERS)
def test_quotient_when_it_is_no_layer_norm_then_it_stays(name):
    assert not name_norms(captured(OTHERS[name])).changed


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.weight, self.bias = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, x):
        return self.b(self.weight[:, None, None] * convnext(self.a(x)) + self.bias[:, None, None])


@pytest.mark.parametrize("backend", ["xnnpack", "onnx"])
def test_norm_of_channels_when_lowered_then_as_the_model(backend):
    pytest.importorskip({"xnnpack": "executorch", "onnx": "onnxruntime"}[backend])
    torch.manual_seed(0)
    model, x = Norms().eval(), torch.randn(1, 3, 6, 6)
    artifact = pq.quantize(model, (x,), calibration_data=[x], backend=backend, progress=False)
    assert pq.sqnr_db(model(x), artifact.run(x)) > 30
