"""Prepared graphs with control flow: called with gradients, trained, and left as they were."""

import copy

import pytest
import torch
from torch import nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.overrides import _len_torch_function_stack

import pt2e_quant as pq
from pt2e_quant.pt2e import disable_observer

# torch.export's own, of inputs of a body
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)


class Branch(Base):
    def forward(self, x):
        y = torch.relu(self.first(x))
        return torch.cond(x.sum() > -1e9, lambda a: self.inner(a), lambda a: a * 2.0, (y,))


class Nested(Base):
    def forward(self, x):
        def chosen(a):
            return torch.cond(a.sum() > 1e9, lambda b: b * 2.0, lambda b: self.inner(b), (a,))

        return torch.cond(x.sum() > 1e9, lambda a: a * 3.0, chosen, (self.first(x),))


class Loop(Base):
    def forward(self, x):
        def body(i, y):
            return i + 1, torch.tanh(self.inner(y))

        return while_loop(lambda i, y: i < 3, body, (torch.tensor(0), self.first(x)))[1]


class Scan(Base):
    def forward(self, x):
        def step(carry, row):
            carry = torch.tanh(self.inner(carry) + row)
            return carry, carry * 2.0

        last, rows = scan(step, torch.zeros(8), self.first(x))
        return rows + last


class Rows(Base):
    def forward(self, x):
        return map_rows(lambda row: self.inner(row), self.first(x))


X = torch.linspace(-2, 2, 32).sin().reshape(4, 8)
MODELS = [Branch, Nested, Loop, Scan, Rows]


def quantizer():
    return pq.backends.get("onnx").quantizer("int8")


def prepared_by(prepare, made):
    torch.manual_seed(0)
    model = made()
    model = model.train() if prepare is pq.prepare_qat_pt2e else model.eval()
    return prepare(torch.export.export(model, (X,)), quantizer())


@pytest.mark.parametrize("made", MODELS)
def test_prepared_when_called_with_gradients_then_as_without(made):
    with_gradients, without = (prepared_by(pq.prepare_pt2e, made) for _ in range(2))
    found = with_gradients(X)
    with torch.no_grad():
        expected = without(X)
    assert found.requires_grad
    assert torch.equal(found, expected)
    converted, other = map(pq.convert_pt2e, (with_gradients, without))
    assert torch.equal(converted(X), other(X))


@pytest.mark.parametrize("made", MODELS)
def test_prepared_when_a_body_is_trained_then_converted_as_trained(made):
    prepared = copy.deepcopy(prepared_by(pq.prepare_qat_pt2e, made))
    before = {name: value.clone() for name, value in prepared.named_parameters()}
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = (prepared(X) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert not any(torch.equal(v, before[name]) for name, v in prepared.named_parameters())
    prepared.eval().apply(disable_observer)
    expected = prepared(X)
    assert torch.equal(pq.convert_pt2e(prepared)(X), expected)


def test_prepared_when_saved_and_loaded_then_its_bodies_are_trained_too(tmp_path):
    pq.save(prepared_by(pq.prepare_qat_pt2e, Branch), tmp_path / "trained.ptq")
    loaded = pq.load(tmp_path / "trained.ptq")
    loaded(X).sum().backward()
    assert all(value.grad is not None for value in loaded.parameters())


def test_prepared_when_a_body_fails_then_nothing_of_it_stays_on(monkeypatch):
    prepared = prepared_by(pq.prepare_pt2e, Branch)

    def failing(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(prepared.true_graph_0, "forward", failing)
    with pytest.raises(ZeroDivisionError):
        prepared(X)
    assert _len_torch_function_stack() == 0
