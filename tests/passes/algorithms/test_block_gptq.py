"""Block GPTQ: its integers, what they gain in whole models, and when plain rounding stays."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.effort import Effort
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.flow.annotate.rules import QuantRule, RuleKind
from pt2e_quant.observers.statistics.input_hessian import Window, rows_of
from pt2e_quant.passes.algorithms import block_gptq
from pt2e_quant.passes.algorithms.batch_norm_reestimation import BatchNormReestimation
from pt2e_quant.passes.algorithms.bias_correction import BiasCorrection
from pt2e_quant.passes.algorithms.block_gptq import BlockGptq, Moments, round_blocks
from pt2e_quant.passes.algorithms.choose_ranges import ChooseRanges
from pt2e_quant.passes.algorithms.gptq import Gptq
from pt2e_quant.passes.algorithms.grid import Grid
from pt2e_quant.passes.algorithms.registry import combined, with_effort
from pt2e_quant.passes.algorithms.weight_blocks import output_errors
from tests.passes.algorithms.test_gptq import WIDTH, Net, correlated, error

pytestmark = pytest.mark.usefixtures("unmeasured")

OWN = BlockGptq(any_observer=False)
CORRECTIONS = ("batch_norm_reestimation", "bias_correction")
OWN_BIASES = BiasCorrection(least_samples=8, any_observer=False)


def images(count: int = 8, seed: int = 0) -> list[torch.Tensor]:
    """Images whose channels are mixtures of a few."""
    return [x.permute(0, 3, 1, 2) for x in correlated(count, seed, (16, 16))]


class Two(nn.Module):
    """Two convolutions, one in groups, and a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(WIDTH, 32, 3, padding=1, bias=False)
        self.second = nn.Conv2d(32, 32, 3, groups=8)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = torch.relu(self.second(torch.relu(self.first(x))))
        return self.head(x.mean((2, 3)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return Two().eval()


def converted(model, data, backend="onnx", effort=None, algorithms=(), recipe="int8", **observers):
    quantizer = pq.backends.get(backend).quantizer(recipe)
    if observers:
        quantizer.with_observers(**observers)
    program = torch.export.export(model, (data[0],))
    prepared = pq.prepare_pt2e(program, quantizer, effort=effort, algorithms=algorithms)
    return pq.convert_pt2e(pq.calibrate(prepared, data, progress=False))


def weight_steps(gm) -> list[str]:
    """What algorithms did to weights."""
    return [
        step for r in pq.provenance_of(gm).tensors for step in r.steps if "output error" in step
    ]


def notes(gm) -> list[str]:
    return [n for n in pq.provenance_of(gm).notes if "weights" in n]


@given(
    groups=st.integers(1, 3),
    channels=st.integers(1, 40),
    window=st.sampled_from([(), (3,), (3, 3)]),
    rows=st.integers(1, 4),
)
@settings(deadline=None, max_examples=60)
def test_moments_when_a_weight_is_split_then_join_gives_it_back(groups, channels, window, rows):
    columns = channels * math.prod(window)
    blocks = min(channels, -(-columns // block_gptq.COLUMNS))
    moments = Moments(groups, columns, -(-channels // blocks) * math.prod(window))
    weight = torch.randn(groups * rows, channels, *window)
    split = moments.split(weight, 7.0)
    assert split.shape[1:] == (rows, moments.size)
    assert torch.equal(moments.join(split, weight.shape), weight)
    summed = moments.join_rows(moments.split(weight).sum(2))
    torch.testing.assert_close(summed, weight.flatten(1).sum(1), atol=1e-4, rtol=1e-4)


@given(
    shape=st.tuples(st.integers(1, 3), st.just(4), st.integers(3, 20), st.integers(3, 20)),
    most=st.integers(1, 50),
    stride=st.integers(1, 2),
)
@settings(deadline=None, max_examples=60)
def test_rows_when_limited_then_some_of_all_rows(shape, most, stride):
    x = torch.randn(shape)
    window = Window((3, 2), (stride, stride), ((1, 1), (0, 1)), (1, 1), 2)
    every, some = rows_of(x, window), rows_of(x, window, most)
    assert 1 <= some.shape[1] <= every.shape[1]
    for group in range(2):
        found = {tuple(row.tolist()) for row in every[group]}
        assert all(tuple(row.tolist()) in found for row in some[group])


def test_integers_when_one_block_then_those_of_gptq():
    torch.manual_seed(0)
    weight, x = torch.randn(6, 64), torch.cat(correlated()).reshape(-1, WIDTH)
    scale = (weight.abs().amax(1, keepdim=True) / 7).expand_as(weight)
    grid = Grid(scale, torch.zeros_like(weight), -7, 7)
    square = x.T @ x / len(x)
    expected = Gptq(static_groups=True)._round(weight, grid, square)
    found = round_blocks(weight[None], grid.change(lambda q: q[None]), square[None], 0.01)[0]
    torch.testing.assert_close(found, expected)
    errors = [output_errors(weight - v, square).sum() for v in (grid.nearest(weight), found)]
    assert errors[1] < 0.3 * errors[0]


@pytest.mark.parametrize("backend", ["onnx", "xnnpack", "cpu"])
@pytest.mark.parametrize("effort", [None, "balanced"])
def test_default_when_inputs_are_correlated_then_the_whole_model_gains(backend, effort):
    torch.manual_seed(0)
    model = Net(nn.Conv2d(WIDTH, 32, 3)).eval()
    with torch.no_grad():  # wide steps: the error of weights is the greater one
        model.layer.weight[:, 0, 0, 0] = 1.0
    data, held_out = images(8, seed=1), images(8, seed=2)
    plain = converted(model, data, backend, "fast")
    gm = converted(model, data, backend, effort)
    assert not weight_steps(plain)
    assert len(weight_steps(gm)) == 1
    assert error(model, gm, held_out) < 0.9 * error(model, plain, held_out)
    assert any("the integers of" in note for note in notes(gm))


@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
def test_artifact_when_integers_are_chosen_then_it_runs_them(backend):
    model, data = network(), images(8, seed=1)
    gm = converted(model, data, backend)
    assert len(weight_steps(gm)) >= 2
    with torch.no_grad():
        expected = [gm(x) for x in images(3, seed=3)]
    artifact = pq.backends.get(backend).lower(gm)
    assert pq.sqnr_db(expected, [artifact.run(x) for x in images(3, seed=3)]) > 35


def test_bias_when_inputs_have_a_mean_then_it_takes_the_mean_error():
    torch.manual_seed(1)
    model = Net(nn.Linear(WIDTH, 16)).eval()
    data = [x + 3.0 for x in correlated(8, seed=1)]
    gm = converted(model, data)
    with torch.no_grad():
        wrong = torch.cat([(gm(x) - model(x)).flatten(0, -2) for x in data])
        plain = converted(model, data, effort="fast")
        before = torch.cat([(plain(x) - model(x)).flatten(0, -2) for x in data])
    assert wrong.mean(0).square().mean() < 0.5 * before.mean(0).square().mean()
    assert wrong.square().mean() < before.square().mean()


@pytest.mark.parametrize("count", [1, 7])
def test_default_when_few_calls_then_plain_and_said(count):
    gm = converted(network(), images(count))
    assert not weight_steps(gm)
    assert any(f"other integers need 8 calls, found {count}" in note for note in notes(gm))


def test_default_when_the_model_loses_then_plain_rounding_stays(monkeypatch):
    model, data = network(), images(8, seed=1)

    def worst(rows, grid, squares, damping):
        return grid.nearest(-rows)

    monkeypatch.setattr(block_gptq, "round_blocks", worst)
    monkeypatch.setattr(
        block_gptq, "output_errors", lambda difference, _: -difference.square().sum(-1)
    )
    gm = converted(model, data, "onnx")
    assert not weight_steps(gm)
    assert any("weights are rounded plainly: on 1 calls" in note for note in notes(gm))
    plain = converted(model, data, "onnx", "fast")
    weights = [
        [v for name, v in found.state_dict().items() if v.dtype == torch.int8 and v.dim() > 1]
        for found in (gm, plain)
    ]
    assert weights[0]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_default_when_somebody_chose_the_observers_then_plain():
    data = images(8)
    chosen = {"activation": pq.MinMaxObserver}
    assert not weight_steps(converted(network(), data, **chosen))
    assert weight_steps(converted(network(), data, effort="balanced", **chosen))


def test_rule_when_it_leaves_the_algorithm_out_then_that_weight_is_rounded_plainly():
    data, model = images(8), network()
    quantizer = pq.backends.get("onnx").quantizer("int8")
    rule = QuantRule(
        kind=RuleKind.MODULE_NAME, pattern="second", scheme=quantizer.scheme, algorithms=frozenset()
    )
    quantizer.add_rule(rule)
    program = torch.export.export(model, (data[0],))
    prepared = pq.prepare_pt2e(program, quantizer)
    gm = pq.convert_pt2e(pq.calibrate(prepared, data, progress=False))
    records = {r.name: r.steps for r in pq.provenance_of(gm).tensors if "weight" in r.name}
    assert any("first" in name and steps for name, steps in records.items())
    assert not any("second" in name and steps for name, steps in records.items())


def test_names_when_another_choice_of_integers_is_asked_for_then_it_takes_its_place():
    assert combined([OWN], ["gptq"]) == (Gptq(),)
    assert combined([OWN], ["block_gptq"]) == (BlockGptq(),)
    assert combined([OWN], ["bias_correction"])[0] == OWN
    both = BatchNormReestimation(), OWN_BIASES
    assert combined([OWN_BIASES], ["batch_norm_reestimation"]) == both
    assert combined([], ["bias_correction", "batch_norm_reestimation"])[0] == both[0]
    with pytest.raises(ConfigError, match="both choose the integers of weights"):
        combined([], ["gptq", "block_gptq"])


@pytest.mark.parametrize(
    ("effort", "asked", "brought"),
    [
        (None, (), ["bias_correction", "block_gptq", "choose_ranges"]),
        (Effort.FAST, (), []),
        (Effort.BALANCED, (), ["bias_correction", "block_gptq"]),
        (Effort.BALANCED, ("adaround",), ["bias_correction"]),
        (Effort.BALANCED, ("batch_norm_reestimation",), ["bias_correction", "block_gptq"]),
        (Effort.BEST, (), [*CORRECTIONS, "confirm_weights", "gptq"]),
        (Effort.BEST, ("block_gptq",), [*CORRECTIONS, "confirm_weights"]),
        (Effort.BEST, ("bias_correction",), ["confirm_weights", "gptq"]),
    ],
)
def test_effort_when_asked_for_then_what_it_brings(effort, asked, brought):
    brings = (ChooseRanges(any_observer=False), OWN, OWN_BIASES)
    own, wanted = with_effort(brings, asked, effort)
    assert sorted(a.name for a in own) == brought
    assert len(combined(own, wanted)) == len(
        {*brought, *asked, "choose_ranges"} - {"choose_ranges" if effort is Effort.FAST else ""}
    )
