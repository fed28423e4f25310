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
from pt2e_quant.backends.cut_graph import cut_behind, values_to_compare
from pt2e_quant.backends.first_apart import MOST_LOWERINGS
from pt2e_quant.backends.gate import check_artifact, choose_sample
from pt2e_quant.core.canonical import verify_canonical
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.reexport import export_again

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


class Chain(nn.Module):
    """Linears one behind the other."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class TwoResults(nn.Module):
    """A linear, and another behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        return x, self.second(x.relu())


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


def put(node: Node, target: Any, *args: Any) -> None:
    """Give the node's users a function of it."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(target, (node, *args))
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def layers(gm: GraphModule) -> dict[str, Node]:
    """The convolutions and linears of a graph by module path."""
    wanted = (aten.conv2d.default, aten.linear.default)
    return {module_of(n): n for n in gm.graph.nodes if n.target in wanted}


def negate_layer(gm: GraphModule, path: str) -> None:
    """Of the layer at a path, where the graph has it."""
    if path in layers(gm):
        put(layers(gm)[path], aten.neg.default)
    gm.recompile()


def scale_layers(gm: GraphModule, factor: float) -> None:
    """Make every layer's result a little larger."""
    for node in layers(gm).values():
        put(node, aten.mul.Tensor, factor)
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
    layer = layers(gm)[path]
    assert error.node_name == layer.name, str(error)
    assert f"first apart at {layer.name}" in str(error)
    assert f"module  {path}" in str(error)
    assert "source  test_first_apart.py" in str(error)
    assert 0 < faulty.lowerings <= 6


def test_refusal_when_a_backend_checks_by_itself_then_it_names_the_layer(
    canonical, plain_backend, monkeypatch
):
    gm = canonical(Branches(), (4, 3, 8, 8))

    def export_wrongly(whole: GraphModule) -> Any:
        broken = copy.deepcopy(whole)
        negate_layer(broken, "left.1")
        return export_again(broken)

    names = plain_backend.lowering().emit.__globals__
    monkeypatch.setitem(names, "export_again", export_wrongly)
    with pytest.raises(ArtifactError, match=r"module  left\.1"):
        plain_backend.lower(gm)


def test_refusal_when_small_faults_add_up_then_no_operator_is_blamed(canonical, plain_backend):
    gm = canonical(Chain(), (16, 16))
    # Each layer alone is 1 % off, which is 40 dB where 35 are asked for.
    error = Faulty(plain_backend, partial(scale_layers, factor=1.01)).refusal(gm)
    assert "no single operator is apart: differences add up, past the bound at" in str(error)


def test_refusal_when_some_parts_cannot_be_lowered_then_they_are_passed_over(
    canonical, plain_backend
):
    gm = canonical(Chain(), (16, 16))
    faulty = Faulty(plain_backend, partial(negate_layer, path="layers.2"))
    whole, tried = faulty.lower, []

    def lower(part: GraphModule) -> Any:
        tried.append(sorted(layers(part)))
        if tried[-1] in (["layers.0", "layers.1"], ["layers.0", "layers.1", "layers.2"]):
            raise RuntimeError("no kernel")
        return whole(part)

    faulty.lower = lower
    error = faulty.refusal(gm)
    assert ["layers.0", "layers.1"] in tried
    names = [layers(gm)[f"layers.{at}"].name for at in (1, 2, 3)]
    assert "first apart" in str(error)
    assert error.node_name == names[0]
    assert any(text in str(error) for text in (names[2], "between"))


def test_refusal_when_no_part_can_be_lowered_then_the_figure_stands_alone(canonical, plain_backend):
    gm = canonical(Chain(), (16, 16))
    faulty = Faulty(plain_backend, partial(negate_layer, path="layers.2"))
    artifact = faulty.lower(gm)

    def lower(part: GraphModule) -> Any:
        raise RuntimeError("no kernel")

    check = partial(check_artifact, artifact, gm, choose_sample(gm, None), 6.0)
    with pytest.raises(ArtifactError) as plain:
        check()
    with pytest.raises(ArtifactError) as found:
        check(lower_part=lower)
    assert str(found.value) == str(plain.value)
    assert found.value.node_name is None


def test_refusal_when_the_search_itself_fails_then_the_figure_stands_alone(
    canonical, plain_backend, monkeypatch
):
    gm = canonical(Chain(), (16, 16))

    def fail(*args: Any) -> None:
        raise ValueError("the search is broken")

    monkeypatch.setattr("pt2e_quant.backends.judge_results.find_first_apart", fail)
    error = Faulty(plain_backend, partial(negate_layer, path="layers.2")).refusal(gm)
    assert "expected at least" in str(error)
    assert "apart" not in str(error)


def test_check_when_the_artifact_agrees_then_nothing_is_lowered_again(canonical, plain_backend):
    gm = canonical(Chain(), (16, 16))
    faulty = Faulty(plain_backend, lambda broken: None)
    artifact = plain_backend.lower(gm, verify=False)
    check_artifact(artifact, gm, choose_sample(gm, None), 6.0, lower_part=faulty.lower)
    assert faulty.lowerings == 0


@pytest.mark.slow  # long: others of its file run in CI
def test_search_when_the_chain_is_long_then_lowerings_are_as_many_as_halvings(
    canonical, plain_backend
):
    gm = canonical(Chain(40), (16, 16))
    assert len(values_to_compare(gm)) >= 40
    faulty = Faulty(plain_backend, partial(negate_layer, path="layers.13"))
    error = faulty.refusal(gm)
    assert error.node_name == layers(gm)["layers.13"].name
    assert faulty.lowerings <= 8 <= MOST_LOWERINGS


def test_search_when_its_lowerings_are_used_up_then_it_says_so(
    canonical, plain_backend, monkeypatch
):
    monkeypatch.setattr("pt2e_quant.backends.first_apart.MOST_LOWERINGS", 2)
    gm = canonical(Chain(12), (16, 16))
    faulty = Faulty(plain_backend, partial(negate_layer, path="layers.9"))
    error = faulty.refusal(gm)
    assert faulty.lowerings == 2
    assert "the search ended after 2 lowerings" in str(error)
    assert "first apart between" in str(error)


def test_search_when_one_result_is_apart_only_beside_others_then_no_node_is_named(
    canonical, plain_backend
):
    gm = canonical(TwoResults(), (4, 8))

    def spoil(broken: GraphModule) -> None:
        if len(broken.graph.output_node().args[0]) == 2:
            negate_layer(broken, "second")

    error = Faulty(plain_backend, spoil).refusal(gm)
    assert "not where the program ends with it" in str(error)
    assert error.node_name is None


def test_search_when_two_results_are_given_then_the_one_that_is_apart_is_searched(
    canonical, plain_backend
):
    gm = canonical(TwoResults(), (4, 8))
    for path in ("first", "second"):
        error = Faulty(plain_backend, partial(negate_layer, path=path)).refusal(gm)
        assert error.node_name == layers(gm)[path].name


def test_cut_graph_when_cut_behind_a_value_then_ends_there_and_the_graph_stays_as_it_was(canonical):
    gm = canonical(Branches(), (4, 3, 8, 8))
    before = str(gm.graph)
    x = torch.randn(4, 3, 8, 8)
    taken = {}

    class Note(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            taken[n.name] = super().run_node(n)
            return taken[n.name]

    Note(gm).run(x, enable_io_processing=False)
    values = values_to_compare(gm)
    assert len(values) >= len(LAYERS)
    for value in values:
        part = cut_behind(gm, value.name)
        verify_canonical(part)
        (found,) = part(x)
        assert torch.equal(found, taken[value.name])
        assert capture_of(part).out_spec.num_leaves == 1
    assert str(gm.graph) == before


class Floored(nn.Module):
    """A linear behind the floor of another's result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.floor(self.first(x) * 4))


def test_refusal_when_steps_flip_in_front_of_the_fault_then_they_are_not_blamed(
    canonical, plain_backend
):
    gm = canonical(Floored(), (256, 16))

    def fault(part: GraphModule) -> None:
        put(layers(part)["first"], aten.mul.Tensor, 1.004)
        if "second" in layers(part):
            put(layers(part)["second"], aten.neg.default)
        part.recompile()

    error = Faulty(plain_backend, fault).refusal(gm)
    assert error.node_name == "linear_1", str(error)
