"""Parameters that `quantize_` leaves float: each is in the report, with a reason."""

import copy
import warnings

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant import training
from pt2e_quant.tensors import prune_2_4_
from pt2e_quant.tensors.graphs.graph import quantized_weights
from pt2e_quant.tensors.kernels import choose_fastest
from pt2e_quant.tensors.quantize import quantize_
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from pt2e_quant.training import prepare_qat_

transformers = pytest.importorskip("transformers")
Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D
IDS = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))


class Own(nn.Module):
    """A module of somebody's own with a weight, and a bare parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.table = nn.Parameter(torch.randn(2, 4, 8))

    def forward(self, x):
        return x @ self.weight + self.table[0, 0]


def odd_model():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "linear": nn.Linear(8, 8),
            "conv": nn.Conv2d(1, 2, 3),
            "embedding": nn.Embedding(4, 8),
            "bag": nn.EmbeddingBag(4, 8),
            "bilinear": nn.Bilinear(4, 4, 4),
            "attention": nn.MultiheadAttention(8, 2),
            "lstm": nn.LSTM(4, 4),
            "own": Own(),
            "turned": Conv1D(8, 8),
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        }
    )


@pytest.mark.parametrize("filter", [None, lambda m, p: isinstance(m, nn.Conv2d | nn.Embedding)])
def test_report_when_parameters_stay_float_then_each_has_a_row_with_a_reason(filter):
    model = odd_model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = quantize_(model, "w8", filter, strict=False)
    said = {row.name for row in (*report.floats, *report.others) if row.reason}
    left = {
        name
        for name, value in model.named_parameters()
        if value.dim() >= 2 and not isinstance(value, QuantizedTensor)
    }
    assert left
    assert left <= said
    assert not {row.name for row in report.quantized} & said
    assert "own.table" in str(report) or "Own.table" in str(report)


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=2, vocab_size=128, n_positions=32, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Logits(transformers.GPT2LMHeadModel(config)).eval()


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids).logits


@pytest.mark.parametrize(
    ("scheme", "least"), [("w8", 38), ("int8_dynamic", 35), ("w4_g32", 15), ("nf4", 15)]
)
def test_gpt2_when_quantized_then_its_transposed_linears_too(scheme, least):
    model = gpt2()
    expected = model(IDS)
    report = quantize_(model, scheme)
    assert len(report.quantized) == 9
    with pq.tensors.strict():
        assert pq.sqnr_db([expected], [model(IDS)]) > least
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IDS), model(IDS))


def test_transposed_linear_when_quantized_then_as_a_linear_of_its_transpose():
    torch.manual_seed(0)
    turned, linear = Conv1D(16, 64), nn.Linear(64, 16)
    with torch.no_grad():
        turned.bias.normal_()
        linear.weight.copy_(turned.weight.t())
        linear.bias.copy_(turned.bias)
    x = torch.randn(3, 5, 64, requires_grad=True)
    for scheme in ("w8", "w4_g32", "int8_dynamic"):
        pair = [copy.deepcopy(module).eval() for module in (turned, linear)]
        for module in pair:
            quantize_(module, scheme)
        assert torch.equal(pair[0](x), pair[1](x))
        (of_x,) = torch.autograd.grad(pair[0](x).sum(), x)
        assert torch.equal(of_x, torch.autograd.grad(pair[1](x).sum(), x)[0])
        assert pair[0].weight.nbytes == pair[1].weight.nbytes


def test_gpt2_when_it_becomes_a_graph_then_its_codes_are_there_and_load_back():
    model, other = gpt2(), gpt2()
    quantize_(model, "w8", layout="plain")
    graph = pq.tensors.to_graph(model, (IDS,))
    torch.testing.assert_close(graph(IDS), model(IDS), rtol=1e-4, atol=1e-4)
    names = pq.tensors.load_graph(other, graph)
    assert "model.transformer.h.0.mlp.c_fc.weight" in names
    assert torch.equal(other(IDS), model(IDS))


def test_gpt2_when_algorithms_round_then_its_transposed_linears_too():
    model = gpt2()
    expected = model(IDS)
    report = quantize_(model, "w8", algorithms=["gptq"], calibration_data=[(IDS,)])
    assert len(report.quantized) == 9
    assert pq.sqnr_db([expected], [model(IDS)]) > 38


def stored(module, scheme):
    training.quantize_parameters(module, scheme)
    return training.with_master_weights(torch.optim.AdamW, module, lr=0.03)


def converted(module, convert, *config):
    convert(module, *config)
    return torch.optim.AdamW(module.parameters(), lr=0.03)


ROWWISE = training.Float8TrainingConfig(scaling="rowwise")
WAYS_TO_TRAIN = {
    "float8": lambda m: converted(m, training.convert_to_float8_training, ROWWISE),
    "int8": lambda m: converted(m, training.convert_to_int8_training),
    "stored as w8": lambda m: stored(m, "w8"),
    "stored as w4_g32": lambda m: stored(m, "w4_g32"),
    "fake-quantized w4_g32": lambda m: converted(m, prepare_qat_, "w4_g32"),
    "fake-quantized int8": lambda m: converted(m, prepare_qat_, "int8"),
}


@pytest.mark.parametrize("way", WAYS_TO_TRAIN)
def test_transposed_linear_when_trained_then_as_a_linear_of_its_transpose(way):
    torch.manual_seed(0)
    turned, linear = Conv1D(16, 64), nn.Linear(64, 16)
    with torch.no_grad():
        linear.weight.copy_(turned.weight.t())
        linear.bias.copy_(turned.bias)
    torch.compiler.reset()  # Dynamo counts what it compiles of one forward
    x, results = torch.randn(3, 5, 64), []
    for model in (nn.Sequential(turned), nn.Sequential(linear)):
        start = model(x).detach()
        optimizer = WAYS_TO_TRAIN[way](model)
        torch.manual_seed(1)  # of stochastic rounding
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        made = model.eval()(x)
        assert pq.sqnr_db([start], [made]) < 20  # it has learned
        if way.startswith("fake"):
            training.convert_qat_(model)
            assert pq.sqnr_db([made], [model(x)]) > 45
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), model(x))
        results.append((made, model(x), sum(p.nbytes for p in model.parameters())))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


@pytest.mark.parametrize("way", ["float8", "stored as w8", "fake-quantized int8"])
def test_gpt2_when_trained_then_its_loss_falls(way):
    model = gpt2().train()
    optimizer = WAYS_TO_TRAIN[way](model)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        logits = model(IDS)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("with_data", [False, True])
def test_transposed_linear_when_pruned_then_as_a_linear_of_its_transpose(with_data):
    torch.manual_seed(0)
    turned, linear = Conv1D(16, 64), nn.Linear(64, 16)
    with torch.no_grad():
        linear.weight.copy_(turned.weight.t())
        linear.bias.copy_(turned.bias)
    data = [(torch.randn(80, 64),)] if with_data else None
    x = torch.randn(3, 5, 64)
    pair = [nn.Sequential(turned), nn.Sequential(linear)]
    for module in pair:
        prune_2_4_(module, data)
    assert torch.equal(turned.weight.t(), linear.weight)
    assert int((turned.weight.t().reshape(-1, 4) != 0).sum(1).max()) == 2
    for module in pair:
        quantize_(module, "w8", layout="sparse_2_4")
    torch.testing.assert_close(pair[0](x), pair[1](x))


def test_gpt2_when_kernels_are_measured_then_its_transposed_linears_are_too(monkeypatch):
    monkeypatch.setattr(choose_fastest, "_time", lambda x, weight, bias: weight.nbytes)
    model = gpt2()
    expected = model(IDS)
    report = choose_fastest.auto_quantize(model, (IDS,), verbose=False)
    shapes = {choice.name: choice.shape for choice in report.choices}
    assert shapes["model.transformer.h.0.mlp.c_fc.weight"] == (IDS.numel(), 64, 256)
    assert shapes.keys() <= quantized_weights(model).keys()
    assert len(shapes) == 9
    with pq.tensors.strict():
        assert pq.sqnr_db([expected], [model(IDS)]) > 35
