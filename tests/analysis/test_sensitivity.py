"""What quantizing each group alone costs."""

import copy
import json
import math
from functools import partial

import pytest
import torch
from torch.export import export

import pt2e_quant as pq
from pt2e_quant.analysis import group_costs
from pt2e_quant.analysis.float_twin import FloatTwin, quantized_source
from pt2e_quant.analysis.graph_side import GraphSide
from pt2e_quant.analysis.open_side import open_graph
from pt2e_quant.analysis.sensitivity import _float_weights
from pt2e_quant.core.errors import ArtifactError, ConfigError, InputError
from pt2e_quant.flow.calibrate.sample import sqnr_db
from tests.analysis.test_compare import scaled_range


def test_sensitivity_when_exact_then_every_operator_has_a_small_cost(made):
    _, program, _, quantized, batches = made
    found = pq.sensitivity(program, quantized, batches, progress=False)
    names = {node.name for node in program.graph.nodes}
    assert {row.group for row in found} <= names
    assert {"conv2d", "conv2d_1", "conv2d_2", "linear", "add_"} <= {row.group for row in found}
    assert found.group("linear").weights == ("head.weight",)
    assert found.group("linear").elements == 160
    assert found.group("linear").module == "head"
    assert all(0 < row.cost < 1e-2 for row in found)
    assert "<td>conv2d_1</td>" in found._repr_html_()
    assert found.batches == 2


def test_sensitivity_when_one_group_is_on_then_the_cost_is_that_of_a_graph_of_it_alone(made):
    """Every other dequantize of the graph is taken out by hand."""
    model, program, _, quantized, batches = made
    found = pq.sensitivity(program, quantized, batches, progress=False)
    side = GraphSide(quantized, "")
    twin = FloatTwin(side, _float_weights(open_graph(program, None), side))
    group = next(g for g in twin.groups if g.name == "conv2d_1")
    hand = copy.deepcopy(quantized)
    by_name = {node.name: node for node in hand.graph.nodes}
    for node in twin.order:
        if node in group.dequantizes:
            continue
        if (source := quantized_source(node)) is not None:
            by_name[node.name].replace_all_uses_with(by_name[source.name])
        elif node in twin.float_weights:
            hand.register_buffer(f"plain_{node.name}", twin.float_weights[node])
            with hand.graph.inserting_before(by_name[node.name]):
                plain = hand.graph.get_attr(f"plain_{node.name}")
            by_name[node.name].replace_all_uses_with(plain)
    hand.recompile()
    with torch.no_grad():
        expected = torch.cat([model(b) for b in batches])
        got = torch.cat([hand(b) for b in batches])
    assert found.group("conv2d_1").cost == pytest.approx(
        10 ** (-sqnr_db(expected, got) / 10), rel=0.02
    )


def test_sensitivity_when_a_range_is_wrong_then_the_groups_that_have_it_cost_most(made):
    _, program, _, quantized, batches = made
    wrong = scaled_range(quantized, "conv2d_2", 16)
    exact = pq.sensitivity(program, wrong, batches, progress=False)
    gradient = pq.sensitivity(program, wrong, batches, method="gradient", progress=False)
    assert {row.group for row in exact.worst(2)} == {"conv2d_2", "add_"}
    assert {row.group for row in gradient.worst(2)} == {"conv2d_2", "add_"}


def test_sensitivity_when_by_gradient_then_it_orders_as_the_exact_one(made):
    _, program, _, quantized, batches = made
    exact = pq.sensitivity(program, quantized, batches, progress=False)
    gradient = pq.sensitivity(program, quantized, batches, method="gradient", progress=False)
    ours = torch.tensor([row.cost for row in exact]).log10()
    theirs = torch.tensor([row.cost for row in gradient]).log10()
    assert torch.corrcoef(torch.stack([ours, theirs]))[0, 1] > 0.6


class PostNorm(torch.nn.Module):
    """A norm whose result a layer and the residual sum behind it read."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = torch.nn.Linear(16, 32), torch.nn.LayerNorm(32)
        self.first, self.second = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)
        self.head = torch.nn.Linear(32, 8)

    def forward(self, x):
        x = self.norm(self.table(x))
        x = x + 0.1 * torch.tanh(self.first(x))
        return self.head(x + 0.1 * torch.tanh(self.second(x)))


@pytest.mark.parametrize("backend", ["xnnpack", "onnx"])
def test_sensitivity_when_by_gradient_then_a_group_counts_what_it_reads_alone(backend):
    """Neither the other readers of its input, nor a weight's error that its bias takes back."""
    torch.manual_seed(0)
    batches = [torch.randn(16, 16) for _ in range(8)]
    program = export(PostNorm().eval(), (batches[0],))
    options = {"backend": backend, "progress": False}
    exact = pq.sensitivity(program, "int8", batches, **options)
    gradient = pq.sensitivity(program, "int8", batches, method="gradient", **options)
    for row in exact:
        assert row.cost / 2.5 < gradient.group(row.group).cost < row.cost * 2.5, row.group


@pytest.mark.parametrize("backend", ["xnnpack", "onnx"])
@pytest.mark.parametrize("name", ["bottlenecks", "post_norm"])
def test_float_values_when_biases_were_corrected_then_they_are_the_float_models(backend, name):
    torch.manual_seed(0)
    model = PostNorm() if name == "post_norm" else Bottlenecks()
    shape = (4, 16) if name == "post_norm" else (4, 3, 12, 12)
    batches = [torch.randn(*shape) for _ in range(8)]
    program = export(model.eval(), (batches[0],))
    prepared = pq.prepare(program, pq.backends.get(backend).quantizer("int8"))
    side = GraphSide(pq.convert(pq.calibrate(prepared, batches, progress=False)), "")
    twin = FloatTwin(side, _float_weights(open_graph(program, None), side))
    with torch.no_grad():
        values = twin.float_values([batches[0]])
        (result,) = values[twin.gm.graph.output_node()]
        assert sqnr_db(model(batches[0]), result) > 90


@pytest.mark.parametrize("backend", ["xnnpack", "onnx"])
def test_sensitivity_when_by_weights_then_biases_do_not_count(backend):
    torch.manual_seed(0)
    batches = [torch.randn(16, 16) for _ in range(8)]
    model = PostNorm().eval()
    program = export(model, (batches[0],))
    prepared = pq.prepare(program, pq.backends.get(backend).quantizer("int8"))
    quantized = pq.convert(pq.calibrate(prepared, batches, progress=False))
    found = pq.sensitivity(program, quantized, method="weight", progress=False).group("linear_1")
    row = pq.compare(program, quantized, batches, progress=False)
    own = next(r for r in row.weights if r.tensor == "first.weight")
    assert found.cost == pytest.approx(10 ** (-own.sqnr_db / 10), rel=1e-3)


class Bottlenecks(torch.nn.Module):
    """Convolutions whose channels get factors, a depthwise one, and squeeze and excite."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 3)
        self.deep = torch.nn.Conv2d(16, 16, 3, groups=16)
        self.squeeze, self.excite = torch.nn.Conv2d(16, 4, 1), torch.nn.Conv2d(4, 16, 1)
        self.head = torch.nn.Conv2d(16, 8, 1)
        with torch.no_grad():
            self.deep.weight[::3] *= 20

    def forward(self, x):
        x = torch.relu(self.deep(torch.relu(self.stem(x))))
        x = x * torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        return self.head(x)


@pytest.mark.parametrize("method", ["gradient", "weight"])
def test_sensitivity_when_a_method_takes_no_metric_then_one_is_refused(made, method):
    with pytest.raises(ConfigError, match=f'"{method}" takes no metric'):
        pq.sensitivity(
            *(made[1], made[3], made[4]), method=method, metric=lambda o, t: o.sum(), progress=False
        )


@pytest.mark.parametrize("method", ["exact", "weight"])
def test_sensitivity_when_a_method_takes_no_loss_then_one_is_refused(made, method):
    with pytest.raises(ConfigError, match=f'"{method}" takes no loss'):
        pq.sensitivity(
            *(made[1], made[3], made[4]), method=method, loss=lambda o, t: o.sum(), progress=False
        )


def test_sensitivity_when_by_weights_then_no_batch_is_needed(made):
    _, program, _, quantized, _ = made
    found = pq.sensitivity(program, quantized, method="weight", progress=False)
    assert found.batches == 0
    assert 1e-6 < found.group("linear").cost < 1e-3
    assert found.group("add_").cost == 0


def test_sensitivity_when_a_metric_is_given_then_the_cost_is_by_how_much_it_falls(made):
    model, program, _, quantized, batches = made
    pairs = [(b, model(b).argmax(-1)) for b in batches]

    def accuracy(outputs, labels):
        return (outputs.argmax(-1) == labels).float().mean()

    found = pq.sensitivity(program, quantized, pairs, metric=accuracy, progress=False)
    assert found.metric == 1
    assert all(row.cost == 1 - row.metric for row in found)


def test_sensitivity_when_a_recipe_is_named_then_the_program_is_quantized_by_it(made):
    model, _, _, _, batches = made
    named = pq.sensitivity(model, "int8", batches, backend="xnnpack", progress=False)
    assert named.recipe == "int8"
    assert named.group("conv2d").cost > 0
    with pytest.raises(ConfigError, match="of a backend"):
        pq.sensitivity(model, "int8", batches, progress=False)
    with pytest.raises(ConfigError, match="did you mean"):
        pq.sensitivity(model, "int8", batches, method="exakt", progress=False)
    for recipe in ("w8", "int8"):
        with pytest.raises(ConfigError, match="no batch"):
            pq.sensitivity(export(model, (batches[0],)), recipe, backend="xnnpack", progress=False)


class Masked(torch.nn.Module):
    """Takes ids and a mask."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, ids, mask):
        return self.head((self.table(ids) * mask[..., None]).mean(1))


def test_sensitivity_when_a_model_takes_a_pair_then_targets_are_only_the_measures():
    generator = torch.Generator().manual_seed(0)
    pair = torch.randint(0, 8, (2, 5), generator=generator), torch.ones(2, 5)
    program = export(Masked().eval(), pair)
    found = pq.sensitivity(program, "int8", [pair], backend="xnnpack", progress=False)
    assert found.group("linear").cost > 0
    labelled = [((*pair,), torch.zeros(2))]
    graded = pq.sensitivity(
        *(program, "int8", labelled),
        backend="xnnpack",
        method="gradient",
        loss=lambda outputs, labels: (outputs.sum(1) - labels).square().sum(),
        inputs=lambda batch: batch[0],
        targets=1,
        progress=False,
    )
    assert graded.group("linear").cost > 0


def test_sensitivity_when_a_module_has_a_data_loader_then_as_with_a_list(made):
    module, _, _, quantized, batches = made
    every = torch.utils.data.TensorDataset(torch.cat(batches))
    loader = torch.utils.data.DataLoader(every, batch_size=len(batches[0]))
    found = pq.sensitivity(module, quantized, loader, method="gradient", progress=False)
    listed = pq.sensitivity(module, quantized, batches, method="gradient", progress=False)
    assert [row.cost for row in found] == [row.cost for row in listed]
    empty = torch.utils.data.DataLoader(every, sampler=[])
    with pytest.raises(ConfigError, match="needs a batch"):
        pq.sensitivity(module, quantized, empty, progress=False)


def test_sensitivity_when_labels_are_left_in_then_the_error_names_the_argument(made):
    _, program, _, _, batches = made
    labelled = [(batch, torch.zeros(len(batch))) for batch in batches]
    with pytest.raises(InputError, match="inputs=0"):
        pq.sensitivity(program, "int8", labelled, backend="xnnpack", progress=False)
    found = pq.sensitivity(program, "int8", labelled, backend="xnnpack", inputs=0, progress=False)
    assert found.batches == 2


def test_sensitivity_when_a_run_was_stopped_then_it_goes_on_behind_the_last_batch(
    made, tmp_path, monkeypatch
):
    _, program, _, quantized, batches = made
    whole = pq.sensitivity(program, quantized, batches, progress=False)
    cache = tmp_path / "costs.json"
    add, runs = group_costs.ExactCosts.add, []

    def stops(self, call, *, progress):
        if len(runs) == 1:
            raise KeyboardInterrupt
        runs.append(call)
        add(self, call, progress=progress)

    monkeypatch.setattr(group_costs.ExactCosts, "add", stops)
    with pytest.raises(KeyboardInterrupt):
        pq.sensitivity(program, quantized, batches, cache=cache, progress=False)
    assert len(json.loads(cache.read_text())["batches"]) == 1
    monkeypatch.setattr(group_costs.ExactCosts, "add", add)
    again = pq.sensitivity(program, quantized, batches, cache=cache, progress=False)
    assert [row.cost for row in again] == [row.cost for row in whole]
    other = [batch + 1 for batch in batches]
    fresh = pq.sensitivity(program, quantized, other, cache=cache, progress=False)
    assert [row.cost for row in fresh] != [row.cost for row in whole]


def test_sensitivity_when_a_gradient_run_is_stopped_then_it_goes_on_behind_the_last_batch(
    made, tmp_path, monkeypatch
):
    _, program, _, quantized, batches = made
    options = {"method": "gradient", "progress": False}
    whole = pq.sensitivity(program, quantized, batches, **options)
    cache = tmp_path / "costs.json"
    pq.sensitivity(program, quantized, batches[:1], cache=cache, **options)
    add, runs = group_costs.GradientCosts.add, []

    def counted(self, call):
        runs.append(call)
        add(self, call)

    monkeypatch.setattr(group_costs.GradientCosts, "add", counted)
    again = pq.sensitivity(program, quantized, batches, cache=cache, **options)
    assert len(runs) == len(batches) - 1 > 0
    assert [row.cost for row in again] == [row.cost for row in whole]
    pq.sensitivity(program, quantized, batches[:1], cache=cache, progress=False)  # another method
    assert len(json.loads(cache.read_text())["batches"]) == 1


def test_sensitivity_when_another_batch_than_the_first_differs_then_the_cache_is_not_used(
    made, tmp_path
):
    _, program, _, quantized, batches = made
    options = {"method": "gradient", "progress": False}
    cache = tmp_path / "costs.json"
    pq.sensitivity(program, quantized, batches, cache=cache, **options)
    for others in ([batches[0], batches[1] + 1], batches[:1]):
        whole = pq.sensitivity(program, quantized, others, **options)
        again = pq.sensitivity(program, quantized, others, cache=cache, **options)
        assert [row.cost for row in again] == [row.cost for row in whole]
        assert again.batches == len(others)


def test_sensitivity_when_targets_or_the_metric_change_then_the_cache_is_not_used(made, tmp_path):
    _, program, _, quantized, batches = made
    cache = tmp_path / "costs.json"

    def found(factor, metric):
        pairs = [(batch, factor * quantized(batch)) for batch in batches[:1]]
        result = pq.sensitivity(
            program, quantized, pairs, metric=metric, cache=cache, progress=False
        )
        return result.metric

    first = found(1, lambda outputs, targets: float((outputs - targets).abs().mean()))
    assert found(2, lambda outputs, targets: float((outputs - targets).abs().mean())) > first
    doubled = found(1, lambda outputs, targets: float(2 * (outputs - targets).abs().mean()))
    assert doubled == pytest.approx(2 * first)
    for factor in (3, 4):
        scaled = partial(scaled_error, factor=factor)
        assert found(1, scaled) == pytest.approx(factor * first)


def scaled_error(outputs, targets, factor):
    return float(factor * (outputs - targets).abs().mean())


@pytest.mark.parametrize("name", ["", "no/such/costs.json"])
def test_sensitivity_when_the_cache_cannot_be_written_then_refused_at_once(made, tmp_path, name):
    with pytest.raises(ArtifactError, match="cannot write the cache"):
        pq.sensitivity(made[1], made[3], made[4], cache=tmp_path / name, progress=False)


def test_sensitivity_when_written_as_json_then_every_group_is_there(made):
    _, program, _, quantized, batches = made
    found = pq.sensitivity(program, quantized, batches[:1], progress=False)
    data = json.loads(found.to_json())
    assert data["version"] == 1
    assert len(data["groups"]) == len(found)
    assert math.isclose(data["groups"][0]["cost"], found.groups[0].cost)
    assert "linear" in str(found)
