"""An artifact that fails its check names the operator at fault."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

import pt2e_quant as pq
from pt2e_quant.backends.gate import check_artifact, choose_sample
from pt2e_quant.core.errors import ArtifactError

aten = torch.ops.aten


class Branches(nn.Module):
    """Two branches of two convolutions each behind a stem, their sum, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.left = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1))
        self.right = nn.Sequential(nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        return self.head((self.left(x) + self.right(x)).amax((2, 3)))


LAYERS = ("stem", "left.0", "left.1", "right.0", "right.1", "head")


@pytest.fixture
def canonical(plain_backend) -> Callable[..., GraphModule]:
    def make(model: nn.Module, *shapes: Sequence[int]) -> GraphModule:
        generator = torch.Generator().manual_seed(0)
        for parameter in model.eval().parameters():
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 8
            nn.init.normal_(parameter, std=fan_in**-0.5, generator=generator)
        batch = tuple(torch.randn(*shape, generator=generator) for shape in shapes)
        prepared = pq.prepare_pt2e(torch.export.export(model, batch), plain_backend.quantizer())
        pq.calibrate(prepared, [batch], progress=False)
        return pq.convert_pt2e(prepared)

    return make


def module_of(node: Node) -> str:
    return list(node.meta["nn_module_stack"].values())[-1][0]


def negate_layer(gm: GraphModule, path: str) -> None:
    """Of the layer at a path, where the graph has it."""
    for node in gm.graph.nodes:
        if node.target in (aten.conv2d.default, aten.linear.default) and module_of(node) == path:
            with gm.graph.inserting_after(node):
                made = gm.graph.call_function(aten.neg.default, (node,))
            made.meta = dict(node.meta)
            node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    gm.recompile()


class Faulty:
    """Lowers with a fault: what a backend with a wrong pass does, to a whole graph or a part."""

    def __init__(self, backend: Any, fault: Callable[[GraphModule], None]) -> None:
        self.backend = backend
        self.fault = fault
        self.lowerings = 0

    def lower(self, gm: GraphModule) -> Any:
        self.lowerings += 1
        broken = copy.deepcopy(gm)
        self.fault(broken)
        return self.backend.lower(broken, verify=False)

    def refusal(self, gm: GraphModule) -> ArtifactError:
        artifact = self.lower(gm)
        self.lowerings = 0
        with pytest.raises(ArtifactError, match="differs from the canonical graph") as found:
            check_artifact(
                artifact, gm, choose_sample(gm, None), margin_db=6.0, lower_part=self.lower
            )
        return found.value


@pytest.mark.parametrize("path", LAYERS)
def test_refusal_when_one_layer_is_at_fault_then_names_it(canonical, plain_backend, path):
    gm = canonical(Branches(), (4, 3, 8, 8))
    faulty = Faulty(plain_backend, partial(negate_layer, path=path))
    error = faulty.refusal(gm)
    layer = next(
        n
        for n in gm.graph.nodes
        if n.target in (aten.conv2d.default, aten.linear.default) and module_of(n) == path
    )
    assert error.node_name == layer.name, str(error)
    assert f"first apart at {layer.name}" in str(error)
    assert f"module  {path}" in str(error)
    assert "source  test_first_apart.py" in str(error)
    assert 0 < faulty.lowerings <= 6


def test_refusal_when_the_gate_of_a_backend_refuses_then_it_names_the_layer(
    canonical, plain_backend, monkeypatch
):
    gm = canonical(Branches(), (4, 3, 8, 8))
    whole = type(plain_backend).lower

    def lower(self, gm, example_inputs=None, **options):
        if options.get("verify", True):
            return whole(self, gm, example_inputs, **options)
        broken = copy.deepcopy(gm)
        negate_layer(broken, "left.1")
        return whole(self, broken, example_inputs, **options)

    monkeypatch.setattr(type(plain_backend), "lower", lower)
    artifact = plain_backend.lower(gm, verify=False)
    with pytest.raises(ArtifactError, match="module  left.1"):
        check_artifact(
            artifact,
            gm,
            choose_sample(gm, None),
            6.0,
            lower_part=partial(plain_backend.lower, verify=False),
        )
