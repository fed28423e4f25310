"""Backends' own quantizers, for training: exact after convert, and down to the file."""

import pytest
import torch
from qat_nets import settled
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import AnnotationError, Pt2eQuantWarning
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.annotate.quantizer import ComposableQuantizer
from pt2e_quant.flow.prepare.prepared import observers_of
from pt2e_quant.flow.qat.train_ranges import for_training
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.static.moving_average import MovingAverageMinMaxObserver
from pt2e_quant.observers.training.fake_quantize import disable_observer
from pt2e_quant.observers.training.learnable_fake_quantize import LearnableFakeQuantize
from pt2e_quant.observers.training.trained_qparams import is_fake_quantize
from pt2e_quant.observers.weights.weight_search import WeightSearch, search_qparams
from pt2e_quant.pt2e.quantize_pt2e import prepare_qat_pt2e

X = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def program():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d(8), nn.ReLU6()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8, 5)),
    )
    batch = torch.export.Dim("batch", max=64)
    return torch.export.export(settled(model).train(), (X,), dynamic_shapes={"input": {0: batch}})


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["xnnpack", "onnx"])
def test_table_quantizer_when_trained_then_the_file_gives_what_evaluation_gave(name):
    pytest.importorskip("executorch" if name == "xnnpack" else "onnxruntime")
    backend = pq.backends.get(name)
    prepared = pq.prepare_qat_pt2e(program(), backend.quantizer("int8"))
    fakes = [m for _, m in observers_of(prepared) if is_fake_quantize(m)]
    assert len(fakes) >= 6
    optimizer = torch.optim.SGD(prepared.parameters(), 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        prepared(X).square().mean().backward()
        optimizer.step()
    prepared.eval().apply(disable_observer)
    expected = prepared(X).detach()
    quantized = pq.convert_pt2e(prepared)
    assert torch.equal(quantized(X), expected)
    artifact = backend.lower(quantized)
    assert sum(artifact.report.integer_ops.values()) >= 3
    assert pq.sqnr_db(expected, artifact.run(X)) > 40


@pytest.mark.parametrize(
    ("name", "layer", "shape"),
    [
        ("onnx", nn.ConvTranspose2d(3, 4, 2, 2), (4, 3, 6, 6)),
        ("xnnpack", nn.Conv3d(3, 4, 3, padding=1), (4, 3, 5, 6, 6)),
    ],
)
@pytest.mark.parametrize("numerics", ["fake_quant", "integer"])
def test_weight_when_its_operator_is_written_as_another_then_trains(name, layer, shape, numerics):
    pytest.importorskip("executorch" if name == "xnnpack" else "onnxruntime")
    torch.manual_seed(0)
    backend, x = pq.backends.get(name), torch.randn(shape)
    ep = torch.export.export(nn.Sequential(layer, nn.ReLU()).train(), (x,))
    quantizer = backend.quantizer("int8").allowing("slower")
    prepared = pq.prepare_qat_pt2e(ep, quantizer, numerics=numerics)
    read = {node.target for node in prepared.graph.nodes if node.op == "get_attr"}
    before = {n: p.detach().clone() for n, p in prepared.named_parameters() if n in read}
    assert len(before) == 2
    optimizer = torch.optim.SGD(prepared.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        prepared(x).square().mean().backward()
        optimizer.step()
    assert not any(torch.equal(before[n], prepared.get_parameter(n)) for n in before)
    prepared.eval().apply(disable_observer)
    expected = prepared(x).detach()
    quantized = pq.convert_pt2e(prepared)
    converted = quantized if numerics == "fake_quant" else pq.integer_reference(quantized)
    assert torch.equal(converted(x), expected)


class Calibrating:
    """A quantizer for calibration only: its specs make observers."""

    def __init__(self) -> None:
        self.inner = pq.backends.get("xnnpack").quantizer("int8_minmax")

    def transform_for_annotation(self, model):
        return self.inner.transform_for_annotation(model)

    def annotate(self, model):
        return self.inner.annotate(model)

    def validate(self, model):
        return None


def test_quantizer_when_it_makes_no_fake_quantizes_then_refused_or_warned_of():
    pytest.importorskip("executorch")
    with pytest.raises(AnnotationError, match="observers that quantize nothing in training"):
        pq.prepare_qat_pt2e(program(), Calibrating())
    with pytest.warns(Pt2eQuantWarning, match="quantize nothing in training"):
        prepare_qat_pt2e(program(), Calibrating())


def test_composed_quantizers_when_trained_then_each_in_its_training_form():
    pytest.importorskip("executorch")
    quantizer = ComposableQuantizer([pq.backends.get("xnnpack").quantizer("int8")])
    prepared = pq.prepare_qat_pt2e(program(), quantizer)
    assert all(is_fake_quantize(m) for _, m in observers_of(prepared) if m.dtype is torch.int8)


def test_observers_when_for_training_then_fake_quantizes_given_stay():
    learned = LearnableFakeQuantize.with_args(observer=MovingAverageMinMaxObserver)
    chosen = for_training(
        ObserverChoice(
            activation=learned,
            weight=MinMaxObserver,
        )
    )
    assert chosen.activation is learned
    assert chosen.weight is not MinMaxObserver


def test_weights_in_groups_when_trained_then_refused_by_what_they_are():
    pytest.importorskip("onnxruntime")
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    ep = torch.export.export(model, (torch.randn(4, 64),))
    with pytest.raises(AnnotationError, match=r"(?s)weights in groups.*scale for each channel"):
        pq.prepare_qat_pt2e(ep, pq.backends.get("onnx").quantizer("w4_g32"))


@pytest.mark.parametrize("search", [WeightSearch.MSE, WeightSearch.HQQ])
def test_searched_scales_when_trained_then_those_of_the_weights_until_observers_rest(search):
    pytest.importorskip("executorch")
    quantizer = pq.backends.get("xnnpack").quantizer("int8").with_search(search)
    prepared = pq.prepare_qat_pt2e(program(), quantizer)
    averaged = torch.optim.swa_utils.AveragedModel(prepared, use_buffers=True)
    optimizer = torch.optim.SGD(prepared.parameters(), 0.05)

    def step():
        optimizer.zero_grad()
        prepared(X).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(prepared)

    step()
    fake, weight = next(
        (m, prepared.get_parameter(n.args[0].target))
        for n, m in observers_of(prepared)
        if n.args[0].op == "get_attr" and n.args[0].meta["val"].shape == (5, 8)
    )
    before = weight.detach().clone()
    step()
    expected, _ = search_qparams(
        before, search, quant_min=fake.quant_min, quant_max=fake.quant_max, symmetric=True
    )
    assert torch.equal(fake.scale, expected)
    prepared.apply(disable_observer)
    step()
    assert torch.equal(fake.scale, expected)
    evaluated = prepared.eval()(X)
    again = pq.prepare_qat_pt2e(program(), quantizer)
    again.load_state_dict(prepared.state_dict())
    assert torch.equal(again.eval()(X), evaluated)
    assert torch.equal(pq.convert_pt2e(prepared)(X), evaluated)
