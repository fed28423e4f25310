"""Layers that their own rounding spoils stay float, and all others stay as they were."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.core.recurrent_ops import RecurrentLayer
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import CONV, LINEAR, is_call
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage

pytestmark = [
    pytest.mark.usefixtures("unmeasured", "integers_everywhere"),
    pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights:UserWarning"),
]

BACKENDS = ("xnnpack", "onnx", "cpu")
ODD_AND_EVEN = range(1, 16, 2), range(0, 8, 2)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Centered(nn.Module):
    """Features with a large mean of their own in each sample, less that mean by a product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.center, self.last = nn.Linear(48, 48), nn.Linear(48, 8)
        with torch.no_grad():
            self.center.weight.copy_(torch.eye(48) - torch.full((48, 48), 1 / 48))

    def forward(self, x):
        return self.last(self.center(x))


class DeadChannel(nn.Module):
    """A convolution whose weight for a channel that is always 0 is a thousand times the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.wide = nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3)
        with torch.no_grad():
            self.first.weight[0].zero_()
            self.first.bias[0] = -1.0
            self.wide.weight[:, 0] = 100.0

    def forward(self, x):
        return self.wide(torch.relu(self.first(x)))


def samples(count, seed=0):
    seeds = range(seed, seed + count)
    return [(draw(16, 48, seed=s) + 50 * draw(16, 1, seed=s + 99),) for s in seeds]


class Voice(nn.Module):
    """An LSTM of two layers on powers of a spectrum, of which one is a million times another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(16, 32, 2, batch_first=True), nn.Linear(32, 8)
        self.scale = torch.logspace(0, -6, 16)
        with torch.no_grad():
            self.lstm.weight_ih_l0.div_(self.scale).mul_(0.5)

    def forward(self, x):
        y, _ = self.lstm(x)
        return self.head(y[:, -1])


def spectra(count, seed=0):
    """Of each step, powers that are together loud or faint by four orders of magnitude."""
    bands = torch.logspace(0, -6, 16)
    loudness = 10 ** (
        4 * torch.rand(count, 4, 20, 1, generator=torch.Generator().manual_seed(seed))
    )
    return [(x,) for x in draw(count, 4, 20, 16, seed=seed).square() * bands * loudness / 1e3]


def converted(model, batches, backend, *, without=False):
    quantizer = pq.backends.get(backend).allowing_slower().quantizer("int8")
    if without:
        quantizer.remove_algorithm("keep_float")
    prepared = pq.prepare_pt2e(torch.export.export(model.eval(), batches[0]), quantizer)
    return pq.convert_pt2e(pq.calibrate(prepared, batches, progress=False))


def decibels(model, gm, batches):
    with torch.no_grad():
        return pq.sqnr_db([model(*b) for b in batches], [gm(*b) for b in batches])


def weights_in_integers(gm, overloads=LINEAR):
    return [is_dequantize(n.args[1]) for n in gm.graph.nodes if is_call(n, overloads)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_product_when_it_takes_a_large_mean_off_then_it_alone_stays_float(backend):
    model, batches, held_out = Centered(), samples(8), samples(4, seed=8)
    kept = converted(model, batches, backend)
    plain = converted(model, batches, backend, without=True)
    assert weights_in_integers(plain) == [True, True]
    assert weights_in_integers(kept) == [False, True]
    assert decibels(model, kept, held_out) > decibels(model, plain, held_out) + 6
    (record,) = [r for r in provenance_of(kept).floats if r.reason.startswith("keep_float")]
    assert record.module == "center"
    assert record.reason.endswith("dB of its output; in float")
    assert record.size == model.center.weight.nbytes


@pytest.mark.parametrize("backend", BACKENDS)
def test_layer_when_it_reads_integers_then_these_stay_and_its_weight_does_not(backend):
    model = DeadChannel()
    batches, held_out = ([(draw(2, 16, 9, 9, seed=s),) for s in seeds] for seeds in ODD_AND_EVEN)
    kept = converted(model, batches, backend)
    plain = converted(model, batches, backend, without=True)
    assert weights_in_integers(plain, CONV) == [True, True]
    assert weights_in_integers(kept, CONV) == [True, False]
    (wide,) = [n for n in kept.graph.nodes if is_call(n, CONV) and not is_dequantize(n.args[1])]
    # Of a CPU's convolution only readers ask for integers.
    assert is_dequantize(wide.args[0]) == (backend != "cpu")
    assert decibels(model, kept, held_out) > decibels(model, plain, held_out) + 6


class MoveBiases(Algorithm):
    """Changes the biases of convolutions as those algorithms do that make up for rounding."""

    name, paper, fits = "move_biases", "none", "convolutions"
    stage = Stage.CODES
    needs_calls = True

    def sites(self, graph):
        return [Site(graph, node, "bias") for node in graph.quantized(CONV)]

    def apply(self, site, statistics):
        bias = site.graph.constant(site.node, "bias")
        bias.set(bias.value + 0.25)
        return "moved"


@pytest.mark.parametrize("backend", BACKENDS)
def test_layer_when_left_float_then_its_bias_makes_up_for_no_rounding(backend):
    model, batches = DeadChannel(), [(draw(2, 16, 9, 9, seed=s),) for s in range(4)]
    quantizer = pq.backends.get(backend).allowing_slower().quantizer("int8")
    quantizer.add_algorithm(MoveBiases())
    prepared = pq.prepare_pt2e(torch.export.export(model.eval(), batches[0]), quantizer)
    gm = pq.convert_pt2e(pq.calibrate(prepared, batches, progress=False))
    (wide,) = [n for n in gm.graph.nodes if is_call(n, CONV) and not is_dequantize(n.args[1])]
    for operand, held in zip(wide.args[1:3], (model.wide.weight, model.wide.bias), strict=True):
        assert torch.equal(constant_of(gm, operand), held)


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_when_all_are_well_then_none_is_left(backend):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    gm = converted(model, [(draw(16, 32, seed=seed),) for seed in range(6)], backend)
    assert weights_in_integers(gm) == [True, True]
    assert not [r for r in provenance_of(gm).floats if "keep_float" in r.reason]


@pytest.mark.parametrize("backend", BACKENDS)
def test_recurrent_layer_when_its_features_differ_by_orders_then_float_and_the_next_not(
    backend, tmp_path
):
    model, batches, held_out = Voice().eval(), spectra(8), spectra(4, seed=1)
    artifact = pq.quantize(
        model, batches[0], calibration_data=batches, backend=backend, progress=False
    )
    layers = [n for n in artifact.quantized.graph.nodes if n.target is RecurrentLayer]
    in_integers = [is_dequantize(layer.args[3]) for layer in layers]
    plain = converted(model, batches, backend, without=True)
    if not layers:  # on this machine the CPU's integer layers are slower than float
        assert backend == "cpu"
        return
    assert in_integers == [False, True]
    assert layers[0].args[-1] == "none"
    assert decibels(model, artifact.quantized, held_out) > decibels(model, plain, held_out) + 6
    artifact.save(tmp_path / "model")
    loaded = pq.backends.get(backend).load(tmp_path / "model")
    for found in (artifact, loaded):
        assert pq.sqnr_db(artifact.quantized(*held_out[0]), found.run(*held_out[0])) > 40


def test_recurrent_layer_when_only_its_inputs_spoil_it_then_its_weights_stay_in_integers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LSTM(16, 32, batch_first=True)).eval()
    loudness = 10 ** (3 * torch.rand(8, 4, 20, 1, generator=torch.Generator().manual_seed(0)))
    batches = [(x,) for x in draw(8, 4, 20, 16) * loudness / 30]
    with torch.no_grad():
        model[0].weight_ih_l0.mul_(8)
    gm = converted(model, batches, "onnx")  # one range for all steps
    (layer,) = [n for n in gm.graph.nodes if n.target is RecurrentLayer]
    assert is_dequantize(layer.args[3])
    assert layer.args[-1] == "none"
    (record,) = [r for r in provenance_of(gm).floats if r.reason.startswith("keep_float")]
    assert "weights in integers, all else float" in record.reason
    assert record.size == 0
