import copy

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError, Pt2eQuantWarning
from pt2e_quant.observers.training.fake_quantize import FakeQuantize, disable_observer
from pt2e_quant.tensors import QuantizedTensor
from pt2e_quant.training import convert_qat_, prepare_qat_


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(64, 64, generator=generator), torch.randn(64, 32, generator=generator)


def train(model, steps=10):
    x, y = data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("scheme", ["int8", "w8", "w4", "w4_g32", "fp8_weight_only", "nf4"])
def test_convert_qat_when_trained_then_it_computes_what_was_trained(scheme):
    model = prepare_qat_(net(), scheme)
    losses = train(model)
    assert losses[-1] < 0.8 * losses[0]
    model(data()[0])
    model.apply(disable_observer)
    with torch.no_grad():
        expected = model(data()[0])
        report = convert_qat_(model, layout="plain")
        found = model(data()[0])
    # the same real values, whose products may be summed in another order
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert [row.name for row in report.rows] == ["0.weight", "2.weight"]
    assert {type(model[i].weight) for i in (0, 2)} == {QuantizedTensor}
    assert type(model[0]) is nn.Linear
    assert [name for name, _ in model.named_modules()] == ["", "0", "1", "2"]
    assert not model[0]._forward_pre_hooks


def test_prepare_qat_when_integers_are_plain_then_the_graph_flows_fake_quantizes_train():
    model = prepare_qat_(net(), "w8")
    assert isinstance(model[0].parametrizations["weight"][0], FakeQuantize)
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(data()[0]), model(data()[0]))


def test_prepare_qat_when_nothing_is_meant_or_prepared_then_it_refuses():
    with pytest.raises(ConfigError, match="no module is to be quantized"):
        prepare_qat_(nn.ReLU(), "w8")
    with pytest.raises(ConfigError, match="no module was prepared"):
        convert_qat_(net())
    with pytest.raises(ConfigError, match=r'"0\.weight" cannot be quantized'):
        prepare_qat_(prepare_qat_(net(), "w8"), "w8")


class Tied(nn.Module):
    """The head reads the table of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(96, 64)
        self.middle = nn.Linear(64, 64)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        return self.head(torch.relu(self.middle(self.table(tokens))))


@pytest.mark.parametrize("scheme", ["int8", "w4_g32"])
@pytest.mark.parametrize("kinds", [nn.Linear, (nn.Linear, nn.Embedding)])
def test_convert_qat_when_weights_are_tied_then_all_readers_have_trained_with_them(scheme, kinds):
    model, tokens = Tied(), torch.arange(48).reshape(4, 12)
    prepare_qat_(model, scheme, lambda module, path: isinstance(module, kinds))
    assert torch.equal(model.table.weight, model.head.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
    model.apply(disable_observer)
    trained = model(tokens)
    report = convert_qat_(model)
    assert model.table.weight is model.head.weight
    assert len(report.rows) == 2 + (kinds is not nn.Linear)
    assert pq.sqnr_db([trained], [model(tokens)]) > 40


def test_convert_qat_when_a_linear_is_read_and_never_called_then_its_input_stays_float():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.randn(2, 10, 64)
    prepare_qat_(model, "int8")
    model(x, x, x)[0].square().mean().backward()
    model.apply(disable_observer)
    trained = model(x, x, x)[0]
    with pytest.warns(Pt2eQuantWarning, match='no call of "out_proj" was trained'):
        convert_qat_(model)
    assert model.out_proj.weight.form.input is None
    assert pq.sqnr_db([trained], [model(x, x, x)[0]]) > 40
