"""Cross-layer equalization: a channel that is far too wide, chains, and what minds factors."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.passes.algorithms import CrossLayerEqualization

pytestmark = pytest.mark.usefixtures("unmeasured")

WIDE = torch.ones(16).index_fill_(0, torch.tensor([3]), 100.0)


def images(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 3, 10, 10, generator=generator) for _ in range(count)]


def chain(*between: nn.Module, depthwise: bool = True) -> nn.Sequential:
    """Convolutions of which the first has one channel 100 times as wide as the others."""
    torch.manual_seed(0)
    middle = nn.Conv2d(16, 16, 3, padding=1, groups=16 if depthwise else 2)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), *between, middle, nn.ReLU(), nn.Conv2d(16, 8, 1), nn.ReLU()
    )
    with torch.no_grad():
        model[0].weight.mul_(WIDE[:, None, None, None])
        model[0].bias.mul_(WIDE)
        middle.weight.div_(WIDE[:, None, None, None] if depthwise else by_group(WIDE))
    return model.eval()


def by_group(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(2, 8).repeat_interleave(8, 0)[:, :, None, None]


def quality(gm, model, held) -> float:
    with torch.no_grad():
        return pq.sqnr_db([model(x) for x in held], [gm(x) for x in held])


@pytest.mark.parametrize("depthwise", [True, False])
def test_quality_when_a_channel_is_100_times_too_wide_then_20_db_higher(quantized, depthwise):
    model, held = chain(nn.ReLU(), depthwise=depthwise), images(8, seed=1)
    plain = quality(quantized(model, images(8), "int8"), model, held)
    gm = quantized(model, images(8), "int8", "cross_layer_equalization")
    assert quality(gm, model, held) > plain + (12 if depthwise else 20)
    assert "cross_layer_equalization" in provenance_of(gm).passes


def test_function_when_equalized_then_that_of_the_float_model():
    model, x = chain(nn.ReLU()), images(1)[0]
    program = torch.export.export(model, (x,))
    quantizer = pq.backends.get("onnx").quantizer("int8")
    prepared = pq.prepare_pt2e(program, quantizer, algorithms=["cross_layer_equalization"])
    rows = prepared.get_parameter("0.weight").detach().flatten(1).abs().amax(1)
    assert float(rows.max() / rows.min()) < 10
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-4, atol=1e-4)
    assert float(model[0].weight.detach().flatten(1).abs().amax(1).max()) > 10  # the user's own


def test_chain_when_it_ends_in_pooling_and_a_linear_then_that_pair_too(quantized):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)
    ).eval()
    with torch.no_grad():
        model[0].weight.mul_(WIDE[:, None, None, None])
        model[4].weight.div_(WIDE)
    held = images(8, seed=1)
    plain = quality(quantized(model, images(8), "int8"), model, held)
    gm = quantized(model, images(8), "int8", "cross_layer_equalization")
    assert quality(gm, model, held) > plain + 10


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (nn.ReLU6(), "clips all channels at 6"),
        (nn.Sigmoid(), "sigmoid is no function of one channel that keeps factors"),
    ],
)
def test_pair_when_something_minds_factors_then_declined_with_it(quantized, between, reason):
    gm = quantized(chain(between), images(2), "int8", "cross_layer_equalization")
    assert any(note.startswith("conv2d: ") and reason in note for note in provenance_of(gm).notes)


def test_pair_when_its_channels_are_even_then_left(quantized):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(layer.weight.sign())
    gm = quantized(model, images(2), "int8", "cross_layer_equalization")
    assert "conv2d: its channels are even already" in provenance_of(gm).notes


@pytest.mark.parametrize("deviations", [3.0, 0.0])
def test_bias_when_it_is_large_for_its_spread_then_the_next_layer_takes_it(deviations):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(16)
    nn.init.constant_(norm.weight, 0.5)
    nn.init.constant_(norm.bias, 10.0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), norm, nn.ReLU(), nn.Conv2d(16, 4, 1))
    model.train()
    norm.momentum = None
    for x in images(16, seed=3):
        model(x)
    model.eval()
    x = images(1)[0]
    quantizer = pq.backends.get("onnx").quantizer("int8")
    settings = CrossLayerEqualization(deviations=deviations)
    program = torch.export.export(model, (x,))
    prepared = pq.prepare_pt2e(program, quantizer, algorithms=[settings])
    with torch.no_grad():
        torch.testing.assert_close(prepared(x), model(x), rtol=1e-3, atol=2e-2)
    notes = [n for n in provenance_of(prepared).notes if "biases of 16 channels absorbed" in n]
    assert len(notes) == (1 if deviations else 0)


def test_weights_when_a_foreign_quantizer_gives_them_one_scale_then_equalized():
    module = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
    config = module.get_symmetric_quantization_config(is_per_channel=False)
    model, held = chain(nn.ReLU()), images(8, seed=1)
    found = []
    for names in ((), ("cross_layer_equalization",)):
        program = torch.export.export(model, (held[0],))
        quantizer = module.XNNPACKQuantizer().set_global(config)
        prepared = pq.prepare_pt2e(program, quantizer, algorithms=names)
        gm = pq.convert_pt2e(pq.calibrate(prepared, images(8), progress=False))
        found.append(quality(gm, model, held))
    assert found[1] > found[0] + 15


def test_compare_when_channels_were_divided_then_in_units_of_the_float_model(quantized):
    model, held = chain(nn.ReLU()), images(2, seed=1)
    gm = quantized(model, images(8), "int8", "cross_layer_equalization")
    program = torch.export.export(model, (held[0],))
    found = pq.compare(program, gm, held)
    assert {node.node for node in found.nodes} >= {"conv2d", "conv2d_1", "conv2d_2"}
    assert min(node.sqnr_db for node in found.nodes) > 20
