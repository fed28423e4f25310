"""A wrong pass in a backend: the refusal of its own `lower` names the operator it spoiled."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import pt2e_quant as pq
from pt2e_quant.backends.registry import get
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.graph.pipeline import GraphPass, PassResult

pytestmark = pytest.mark.usefixtures("unmeasured")

aten = torch.ops.aten

WHERE = {"xnnpack": "widen_scales", "onnx": "widen_scales", "cpu": "strip_guards"}
"""A pass that a backend's `lower` runs, to put a wrong one in its place."""


class Cnn(nn.Module):
    """Three convolutions, one of them beside a second input, and two results."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.third = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = self.second(self.first(x).relu()).relu()
        y = x + self.third(y).relu()
        return self.head(x.mean((2, 3))), self.head(y.mean((2, 3)))


class Cached(nn.Module):
    """A linear, a buffer of what it gave in earlier calls, and two linears behind it."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 16)
        self.register_buffer("kept", torch.zeros(1, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        self.kept[:, 2:4] = self.first(x)
        return self.third(self.second(self.kept.clone()).relu())


class Attention(nn.Module):
    """Queries, keys and values of a norm, their attention, and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q = nn.Linear(32, 32)
        self.k = nn.Linear(32, 32)
        self.v = nn.Linear(32, 32)
        self.out = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        found = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(found)


def layer_of(gm: GraphModule, path: str) -> Node | None:
    for node in gm.graph.nodes:
        if node.target in (aten.conv2d.default, aten.linear.default):
            if list(node.meta["nn_module_stack"].values())[-1][0] == path:
                return node
    return None


def spoiling(right: GraphPass, path: str) -> GraphPass:
    """A pass that is wrong about one layer: it turns the order of its filters round."""

    def edit(gm: GraphModule) -> PassResult:
        result = right.edit(gm)
        node = layer_of(gm, path)
        if node is None:
            return result
        # In float, where the refusal has the layer left so: that does not mend it.
        reader, at = (node.args[1], 0) if node.args[1].op == "call_function" else (node, 1)
        weight = reader.args[at]
        gm.register_buffer("spoiled", gm.get_buffer(weight.target).flip(0))
        with gm.graph.inserting_before(weight):
            made = gm.graph.get_attr("spoiled")
        made.meta = dict(weight.meta)
        reader.update_arg(at, made)
        gm.graph.eliminate_dead_code()
        return PassResult(changed=True)

    return GraphPass(right.name, edit, right.needs, right.gives)


@pytest.fixture
def refusal(monkeypatch) -> Callable[..., tuple[ArtifactError, Node]]:
    def of(
        name: str,
        model: nn.Module,
        batch: tuple[Tensor, ...],
        path: str,
        recipe: str = "int8",
        **how: Any,
    ) -> tuple[ArtifactError, Node]:
        backend = get(name)
        ep = torch.export.export(model.eval(), batch, **how)
        prepared = pq.prepare_pt2e(ep, backend.quantizer(recipe))
        pq.calibrate(prepared, [batch], progress=False)
        gm = pq.convert_pt2e(prepared)
        lowering = import_module(f"pt2e_quant.backends.{name}.lower")
        right = getattr(lowering, WHERE[name])
        monkeypatch.setattr(lowering, WHERE[name], spoiling(right, path))
        with pytest.raises(ArtifactError, match="differs from the canonical graph") as found:
            backend.lower(gm)
        node = layer_of(gm, path)
        assert node is not None
        return found.value, node

    return of


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def cases(**quick: str) -> list[Any]:
    """Every layer of every runtime; in CI those named, for a runtime's lowering takes a second."""
    return [
        pytest.param(name, path, marks=() if path in quick.get(name, "") else pytest.mark.slow)
        for name in WHERE
        for path in ("first", "second", "third")
    ]


@pytest.mark.parametrize(("name", "path"), cases(cpu="first second third"))
def test_refusal_when_a_pass_spoils_a_layer_then_it_is_named(refusal, name, path):
    torch.manual_seed(0)
    error, node = refusal(name, Cnn(), (noise(4, 3, 8, 8), noise(4, 8, 8, 8)), path)
    assert "first apart" in str(error)
    assert error.node_name == node.name, str(error)


@pytest.mark.parametrize(("name", "path"), cases(cpu="first third", onnx="second"))
def test_refusal_when_the_program_writes_buffers_then_the_layer_is_named(refusal, name, path):
    torch.manual_seed(0)
    model = Cached()
    error, node = refusal(name, model, (noise(1, 2, 16),), path)
    assert error.node_name == node.name, str(error)
    assert not model.kept.any(), "the search wrote into the user's buffer"


@pytest.mark.parametrize("recipe", ["int8", "int8_dynamic"])
@pytest.mark.parametrize("path", ["v", "out"])
def test_refusal_when_values_or_the_projection_are_spoiled_then_they_are_named(
    refusal, recipe, path
):
    torch.manual_seed(0)
    error, node = refusal("cpu", Attention(), (noise(2, 8, 32),), path, recipe)
    assert error.node_name == node.name, str(error)
    assert f"first apart at {node.name}" in str(error)


def test_refusal_when_a_size_is_dynamic_then_the_layer_is_named(refusal):
    torch.manual_seed(0)
    batch = (noise(4, 3, 8, 8), noise(4, 8, 8, 8))
    size = torch.export.Dim("size", max=64)
    error, node = refusal("cpu", Cnn(), batch, "second", dynamic_shapes=({0: size}, {0: size}))
    assert error.node_name == node.name, str(error)
