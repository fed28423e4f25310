"""Values computed from trained parameters alone: they train, and are constants after convert."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.observers.training.fake_quantize import disable_observer

WIDTH = 16


class WindowAttention(nn.Module):
    """One head with a trained table of relative positions, as Swin has it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.table = nn.Parameter(torch.randn(15) * 0.5)
        places = torch.arange(8)
        self.register_buffer("index", places[:, None] - places[None, :] + 7)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(-2, -1) * 0.25 + self.table[self.index]
        return x + scores.softmax(-1) @ v


class Computed(nn.Module):
    """Linears around a value of a parameter."""

    def __init__(self, shape, compute) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.table, self.compute = nn.Parameter(torch.randn(shape)), compute

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + self.compute(self.table))


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def resized(grid: Tensor) -> Tensor:
    larger = functional.interpolate(grid, size=(4, 2), mode="bilinear")
    return larger.flatten(2).transpose(1, 2)


MODELS = {
    "relative positions": WindowAttention,
    "index_select": lambda: Computed(
        (11, WIDTH), lambda t: t.index_select(0, torch.tensor([3, 1, 4, 1, 5, 9, 2, 6]))
    ),
    "roll": lambda: Computed((8, WIDTH), lambda t: t.roll(1, 0)),
    "resize": lambda: Computed((1, WIDTH, 2, 2), resized),
    "tanh": lambda: Computed((WIDTH,), torch.tanh),
    "weight norm": Normalised,
}


@pytest.mark.parametrize("name", MODELS)
def test_value_of_parameters_when_trained_in_integers_then_no_island_and_equal(name):
    torch.manual_seed(0)
    model, x = MODELS[name]().train(), torch.randn(3, 8, WIDTH)
    prepared = pq.prepare_qat_pt2e(
        torch.export.export(model, (x,)), pq.IntegerQuantizer(), numerics="integer"
    )
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        prepared(x).square().mean().backward()
        optimizer.step()
    parameters = [value for key, value in prepared.named_parameters() if "first.bias" not in key]
    assert all(value.grad is not None and value.grad.abs().sum() > 0 for value in parameters)
    trained = prepared.apply(disable_observer).eval()(x)
    converted = pq.convert_pt2e(prepared)
    assert pq.audit(converted).islands == ()
    assert torch.equal(pq.integer_reference(converted)(x), trained)


def test_table_too_large_to_fold_when_it_trains_then_its_rows_are_integers():
    index = torch.randint(15, (300, 1000))
    torch.manual_seed(0)
    model = Computed((15,), lambda t: t[index].sum() * 1e-4).train()
    x = torch.randn(3, 8, WIDTH)
    program = torch.export.export(model, (x,))
    prepared = pq.prepare_qat_pt2e(program, pq.IntegerQuantizer(), numerics="integer")
    prepared(x).sum().backward()
    converted = pq.convert_pt2e(prepared)
    assert pq.audit(converted).islands == ()
