"""Splitting of outlier channels: ranges shrink, the float function and its rounding stay."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.passes.algorithms.cross_layer_equalization import Rounding
from pt2e_quant.passes.algorithms.outlier_channel_splitting import (
    OutlierChannelSplitting,
    _split,
)

WIDTH = 40


def samples(count: int = 8, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(4, 16, generator=generator) for _ in range(count)]


def images(count: int = 8, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 3, 8, 8, generator=generator) for _ in range(count)]


def linears() -> nn.Module:
    """A channel whose weights in the second layer are eight times the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 24))
    with torch.no_grad():
        model[2].weight[:, 7] *= 8
    return model


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, bias=False),
        nn.BatchNorm2d(WIDTH),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 8, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    with torch.no_grad():
        model[3].weight[:, 7] *= 8
    return model


@pytest.mark.parametrize(("build", "data"), [(linears, samples), (convolutions, images)])
def test_error_when_one_channel_sets_the_ranges_then_a_fraction(
    quantized, output_error, build, data
):
    model, held = build().eval(), data(8, seed=1)
    plain = output_error(model, quantized(model, data(), "w4"), held)
    gm = quantized(model, data(), "w4", OutlierChannelSplitting(expand_ratio=0.15))
    # With six channels more the steps of the second layer are a seventh where the one channel set
    # them, and a third where others now do. The error of the first layer's weights stays.
    assert output_error(model, gm, held) < plain / 3
    assert any("6 channels more" in note for note in provenance_of(gm).notes)


def test_function_when_split_then_that_of_the_float_model():
    model, held = convolutions().eval(), images(2, seed=1)
    shapes = ({0: torch.export.Dim("batch", min=1, max=8)},)
    program = torch.export.export(model, (torch.cat(held),), dynamic_shapes=shapes)
    quantizer = pq.backends.get("onnx").quantizer("int8")
    prepared = pq.prepare_pt2e(program, quantizer, algorithms=["outlier_channel_splitting"])
    for x in (held[0], torch.cat(held)):
        assert torch.allclose(prepared(x), model(x), atol=1e-5)
    nodes = [node for node in prepared.graph.nodes if node.op == "call_function"]
    widths = {node.meta["val"].shape[1] for node in nodes}
    assert WIDTH + 2 in widths
    assert WIDTH not in widths


@pytest.mark.parametrize("copies", [2, 3, 5])
def test_shares_when_rounded_then_they_sum_to_the_rounded_weight(copies):
    torch.manual_seed(0)
    weight = torch.randn(16, 6, dtype=torch.float64)
    weight[:, 2] *= 20
    number = torch.tensor([1, 1, copies, 1, 1, 1])
    order = torch.tensor([0, 1, 2, 3, 4, 5, *[2] * (copies - 1)])
    shares = _split(weight, number, order, Rounding(7.0, True))
    step = shares.abs().amax(1, keepdim=True) / 7
    codes = (shares / step).round()
    whole = torch.zeros_like(weight).index_add_(1, order, codes)
    assert torch.equal(whole[:, 2], (weight / step).round()[:, 2])


@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
def test_artifact_when_split_then_it_runs(backend):
    pytest.importorskip("onnxruntime" if backend == "onnx" else "executorch")
    model, data = linears().eval(), samples()
    artifact = pq.quantize(
        model,
        (data[0],),
        calibration_data=data,
        backend=backend,
        algorithms=["outlier_channel_splitting"],
        progress=False,
    )
    with torch.no_grad():
        assert pq.sqnr_db([model(x) for x in data], [artifact.run(x) for x in data]) > 30


def test_compare_when_channels_were_split_then_the_other_nodes(quantized):
    model, held = linears().eval(), samples(2, seed=1)
    gm = quantized(model, samples(), "int8", "outlier_channel_splitting")
    found = pq.compare(torch.export.export(model, (held[0],)), gm, held)
    assert "linear_1" in {node.node for node in found.nodes}
    assert min(node.sqnr_db for node in found.nodes) > 25


class Reshaped(nn.Module):
    """Images of one position, flattened to a number of channels that the graph names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, WIDTH, 8), nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.last(self.first(x).reshape(1, WIDTH))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: nn.Conv2d(WIDTH, WIDTH, 3, groups=WIDTH), "are in groups"),
        (lambda: nn.Conv2d(WIDTH, 8, 1), "no few of its channels"),
        (Reshaped, "names the number of channels"),
    ],
)
def test_pair_when_it_cannot_or_need_not_be_split_then_declined(quantized, build, reason):
    torch.manual_seed(0)
    last = build()
    model = last if isinstance(last, Reshaped) else nn.Sequential(nn.Conv2d(3, WIDTH, 1), last)
    gm = quantized(model, images(), "int8", "outlier_channel_splitting")
    assert any(reason in note for note in provenance_of(gm).notes)


@pytest.mark.parametrize("recipe", ["w4_g32", "a8w4_g32"])
def test_weights_when_in_groups_then_declined(quantized, recipe):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    with torch.no_grad():
        model[2].weight[:, 7] *= 8
    gm = quantized(model, [torch.randn(4, 32)], recipe, "outlier_channel_splitting")
    assert any("have scales for groups" in note for note in provenance_of(gm).notes)


def test_model_when_no_layer_feeds_another_then_refused(quantized):
    with pytest.raises(ConfigError, match="applies to nothing"):
        quantized(nn.Sequential(nn.Linear(16, 4)), samples(), "int8", "outlier_channel_splitting")
