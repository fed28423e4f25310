"""Training for quantization under `torch.compile`: one graph, and the numbers of eager training."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported

import pt2e_quant as pq
from pt2e_quant.observers.training import fake_quantize as ours
from pt2e_quant.observers.training.learnable_fake_quantize import (
    disable_range_learning,
    enable_range_learning,
)
from pt2e_quant.pt2e.fake_quantize import default_affine_fake_quant
from pt2e_quant.training import prepare_qat_
from tests.parameters import named_subset

theirs = pytest.importorskip("torchao.quantization.pt2e.fake_quantize")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
X = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.wide, self.last = nn.Linear(64, 64), nn.Linear(64, 4)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x))).mean((2, 3))
        return self.last(torch.sigmoid(self.wide(x)))


def graph_for(backend):
    torch.manual_seed(0)
    chosen = pq.backends.get(backend)
    if backend == "cpu":
        chosen = chosen.allowing_slower()
    program = torch.export.export(Net().train(), (X,))
    return pq.prepare_qat_pt2e(program, chosen.quantizer("int8"))


def module_for(scheme):
    torch.manual_seed(0)
    return prepare_qat_(Net().train(), scheme)


def train(run, model, steps=2, autocast=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = run(X * (1 + step))
        loss = (result.float() - Y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_alike(compiled, eager):
    found, expected = compiled.state_dict(), eager.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def check_phases(model, library=ours, autocast=False):
    """Train a compiled and an eager copy through all settings of both flags."""
    torch._dynamo.reset()
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for phase in (
        (),
        (library.disable_observer,),
        (library.enable_observer, library.disable_fake_quant),
        (library.disable_observer,),
        (library.enable_fake_quant, library.enable_observer),
    ):
        for switch in phase:
            model.apply(switch)
            eager.apply(switch)
        assert train(run, model, 2, autocast) == train(eager, eager, 2, autocast)
        assert_alike(model, eager)


def test_switches_of_torchao_when_compiled_then_respected():
    check_phases(graph_for("xnnpack"), library=theirs)


@pytest.mark.parametrize(
    "backend", named_subset(["xnnpack", "onnx", "cuda", "cpu"], "xnnpack", "cpu")
)
def test_graph_when_compiled_then_one_graph_that_trains_as_in_eager(backend):
    check_phases(graph_for(backend))


def test_graph_when_compiled_under_autocast_then_as_in_eager():
    check_phases(graph_for("xnnpack"), autocast=True)


@pytest.mark.parametrize("scheme", ["int8", "w8", "w4", "w4_g32", "fp8_weight_only", "nf4"])
def test_module_when_compiled_then_one_graph_that_trains_as_in_eager(scheme):
    check_phases(module_for(scheme))


def test_graph_when_compiled_then_converts_to_what_eager_training_does():
    torch._dynamo.reset()
    model, eager = graph_for("onnx"), graph_for("onnx")
    train(torch.compile(model, backend="aot_eager", fullgraph=True), model, 3)
    train(eager, eager, 3)
    found, expected = (pq.convert_pt2e(m.eval()) for m in (model, eager))
    assert torch.equal(found(X), expected(X))


def test_graph_when_nothing_was_observed_yet_then_compiled_as_in_eager():
    torch._dynamo.reset()
    model = graph_for("onnx").apply(ours.disable_observer)
    eager = copy.deepcopy(model)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eager says that observers saw no data
        assert torch.equal(run(X), eager(X))


@pytest.mark.parametrize("observer", [pq.LSQObserver, pq.LSQPlusWeightObserver])
def test_learned_ranges_when_compiled_then_one_graph_that_trains_as_in_eager(observer):
    torch._dynamo.reset()
    torch.manual_seed(0)
    limits = {"quant_min": -8, "quant_max": 7, "dtype": torch.int8}
    model = nn.Sequential(
        nn.Flatten(),
        pq.LearnableFakeQuantize(observer, qscheme=torch.per_tensor_symmetric, **limits),
        nn.Linear(192, 4),
    )
    with pytest.raises(Unsupported, match="the first batch makes scale"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(X)
    model(X)
    eager = copy.deepcopy(model)
    torch._dynamo.reset()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for switch in (enable_range_learning, disable_range_learning, ours.enable_observer):
        assert train(run, model) == train(eager, eager)
        assert_alike(model, eager)
        model.apply(switch)
        eager.apply(switch)
    assert train(run, model) == train(eager, eager)


def test_affine_fake_quantize_when_compiled_then_as_in_eager():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Flatten(), default_affine_fake_quant(), nn.Linear(192, 4))
    model(X)
    check_phases(model)
