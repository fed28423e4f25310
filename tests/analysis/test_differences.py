"""Differences from the float model's values that are followed in bfloat16."""

import pytest
import torch
from torch import nn
from torch.export import export

import pt2e_quant as pq
from pt2e_quant.accelerate import bfloat16_products
from pt2e_quant.accelerate.bfloat16_products import PATCH
from pt2e_quant.accelerate.patch import VARIABLE
from pt2e_quant.analysis.differences import Changed, Differences, changed_value
from pt2e_quant.graph.ops import aten


@pytest.fixture(autouse=True)
def _multiplies_bfloat16(monkeypatch):
    """Other CPUs compute the same, more slowly; those before AVX-512 not at all."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no products of bfloat16 here")
    monkeypatch.setattr(bfloat16_products, "multiplies_bfloat16", lambda: True)


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Residual(nn.Module):
    """Convolutions with a relu, a residual addition and pooling, a gate, and a linear."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.wide = nn.Conv2d(16, 16, 3, padding=1)
        self.depth = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.down = nn.Conv2d(16, 24, 3, stride=2)
        self.head = nn.Linear(24, 8)

    def forward(self, x):
        x = self.stem(x).relu()
        x = (x + self.wide(x)).relu()
        x = x + nn.functional.hardswish(self.depth(x))
        x = nn.functional.max_pool2d(self.down(x), 2)
        return self.head(x.mean((2, 3))), x[:, 1]


class Attention(nn.Module):
    """A layer of a transformer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.layer(x)[:, 0])


@pytest.mark.parametrize(
    ("model", "shape", "recipe"),
    [
        (Residual, (4, 3, 16, 16), "int8"),
        (Attention, (4, 6, 16), "int8"),
        (Attention, (4, 6, 16), "int8_dynamic"),
    ],
)
def test_sensitivity_when_differences_are_followed_then_costs_are_those_of_float(
    model, shape, recipe, monkeypatch
):
    torch.manual_seed(0)
    program = export(model().eval(), (draw(*shape),))
    batches = [(draw(*shape, seed=seed),) for seed in range(2)]

    def costs():
        found = pq.sensitivity(program, recipe, batches, backend="onnx", progress=False)
        return {row.group: row.cost for row in found}

    followed = costs()
    monkeypatch.setenv(VARIABLE, PATCH.name)
    whole = costs()
    assert followed != whole
    assert followed == pytest.approx(whole, rel=0.02)


CALLS = {
    "conv2d": (aten.conv2d.default, ("x", draw(4, 3, 3, 3), None, [1, 1], [1, 1]), (2, 3, 8, 8)),
    "conv2d with a bias": (aten.conv2d.default, ("x", draw(4, 3, 1, 1), draw(4)), (2, 3, 8, 8)),
    "linear": (aten.linear.default, ("x", draw(5, 6), draw(5)), (3, 6)),
    "relu": (aten.relu.default, ("x",), (3, 60)),
    "add": (aten.add.Tensor, ("x", draw(3, 6)), (3, 6)),
    "add of a row": (aten.add.Tensor, (draw(6), "x"), (3, 6)),
    "mean": (aten.mean.dim, ("x", [2, 3]), (2, 3, 4, 4)),
    "transpose": (aten.transpose.int, ("x", 0, 1), (3, 6)),
    "view": (aten.view.default, ("x", [2, 48]), (2, 3, 4, 4)),
    "select": (aten.select.int, ("x", 1, 2), (3, 6)),
}


def make_graph(target, args):
    """A graph of one call; tensors among its arguments are inputs after the first, x."""
    graph = torch.fx.Graph()
    values = {graph.placeholder("x"): None}
    operands = []
    for number, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            node = graph.placeholder(f"constant_{number}")
            values[node] = arg
            operands.append(node)
        else:
            operands.append(next(iter(values)) if arg == "x" else arg)
    return graph.call_function(target, tuple(operands)), values


@pytest.mark.parametrize("name", CALLS)
def test_follow_when_an_operand_differs_then_the_result_differs_as_when_computed(name):
    target, args, shape = CALLS[name]
    node, values = make_graph(target, args)
    x = next(iter(values))
    base, other = draw(*shape, seed=1), draw(*shape, seed=2)

    def compute(value):
        return target(*(value if arg is x else values.get(arg, arg) for arg in node.args))

    values[x], values[node] = base, compute(base)
    # Small beside the values, and as large as they are: some signs change.
    for size in (1e-3, 1.0):
        difference = (size * other).bfloat16()
        with torch.no_grad():
            found = Differences().follow(node, values, {x: Changed(base, difference=difference)})
            expected = compute(base + difference)
        assert found is not None
        assert found.is_difference
        error = (found.whole() - expected).norm() / (expected - values[node]).norm()
        assert error < 2**-7


def test_follow_when_no_rule_holds_then_it_is_none(monkeypatch):
    x, d = draw(3, 6), draw(3, 6, seed=2).bfloat16()
    for target, args, operand in [
        (aten.gelu.default, ("x",), x),
        (aten.add.Tensor, ("x", draw(2, 3, 6)), x),  # it is broadcast
        (aten.linear.default, ("x", draw(5, 6)), x.double()),
    ]:
        node, values = make_graph(target, args)
        first = next(iter(values))
        values[first] = operand
        constants = [values.get(arg, arg) for arg in node.args]
        values[node] = target(*(c.to(operand.dtype) for c in constants))
        changed = {first: Changed(operand, difference=d)}
        with torch.no_grad():
            assert Differences().follow(node, values, changed) is None
    node, values = make_graph(aten.relu.default, ("x",))
    first = next(iter(values))
    values |= {first: x, node: x.relu()}
    assert Differences().follow(node, values, {first: Changed(x, x + 1)}) is None
    monkeypatch.setenv(VARIABLE, PATCH.name)
    assert Differences().follow(node, values, {first: Changed(x, difference=d)}) is None


def test_changed_value_when_it_has_no_difference_then_it_is_itself():
    x = draw(3)
    whole = changed_value(x, x + 1)
    assert torch.equal(whole.whole(), x + 1)
    assert torch.equal(whole.difference(), torch.ones(3).bfloat16())
    for other in (x.long(), x[:2], 3, None):
        assert changed_value(x, other) is other
