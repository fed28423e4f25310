"""Ranges of activations are chosen by what they cost, on calls that did not set them."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import CalibrationError, ConfigError, Pt2eQuantWarning
from pt2e_quant.flow.prepare.prepared import prepared_state
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.statistics.kept_inputs import KeptCalls, KeptInputs
from pt2e_quant.passes.algorithms import choose_ranges, keep_float
from pt2e_quant.passes.algorithms.algorithm import take_statistics
from pt2e_quant.passes.algorithms.choose_ranges import ChooseRanges, _Chooser
from pt2e_quant.passes.algorithms.observed_run import ObservedRun
from pt2e_quant.passes.algorithms.range_groups import AS_OBSERVED, Calls, range_groups
from tests.passes.algorithms.outlier_images import CHANNELS, Reader, calibrated, images


def converted(model, data, effort, backend="onnx", recipe="int8", left_out="", **observers):
    quantizer = pq.backends.get(backend).quantizer(recipe).allowing("slower")
    if left_out:
        quantizer.remove_algorithm(left_out)
    if observers:
        quantizer.with_observers(**observers)
    program = torch.export.export(model.eval(), (data[0],))
    prepared = pq.prepare_pt2e(program, quantizer, effort=effort)
    return pq.convert_pt2e(pq.calibrate(prepared, data, progress=False))


def sqnr(model, gm, data):
    with torch.no_grad():
        return pq.sqnr_db([model(x) for x in data], [gm(x) for x in data])


def input_record(gm):
    return pq.provenance_of(gm).tensor("x")


@pytest.mark.parametrize("backend", ["onnx", "xnnpack", "cpu"])
@pytest.mark.parametrize("effort", ["balanced", "best"])
def test_choose_ranges_when_outliers_count_for_nothing_then_they_are_clipped(backend, effort):
    model, data, held_out = Reader(0.0), images(8, seed=1), images(8, seed=2)
    before = sqnr(model, converted(model, data, "fast", backend), held_out)
    gm = converted(model, data, effort, backend)
    assert sqnr(model, gm, held_out) > before + 15
    record = input_record(gm)
    assert record.evidence.startswith(("squared error; runner-up", "99.9 %; runner-up"))
    assert record.observed == pytest.approx((-3.0, 100.0))
    notes = [n for n in pq.provenance_of(gm).notes if "activation ranges differ" in n]
    assert len(notes) == 1


class Compared(Reader):
    """The same; what is quantized is also compared with a number, and its places are sorted."""

    def forward(self, x):
        y = torch.relu(self.conv(x))
        return self.after(y), y > 0.5, y.flatten(1).argmax(1), y.flatten(1).topk(3)[1]


@pytest.mark.parametrize("backend", ["onnx", "xnnpack", "cpu"])
def test_choose_ranges_when_a_reader_gives_no_floats_then_judged_at_the_tensor(backend):
    model, data = Compared(0.0), images(8, seed=1)
    gm = converted(model, data, "balanced", backend)
    with torch.no_grad():
        assert pq.sqnr_db(model(data[0])[0], gm(data[0])[0]) > 30
    assert input_record(gm).evidence.startswith(("squared error; runner-up", "99.9 %; runner-up"))


def test_choose_ranges_when_outliers_count_then_the_observed_range_stays():
    model, data = Reader(1.0), images(8, seed=1)
    fast, gm = converted(model, data, "fast"), converted(model, data, "balanced")
    assert input_record(gm).scale == input_record(fast).scale
    assert input_record(gm).evidence.startswith("as observed; runner-up")
    assert input_record(fast).evidence == ""


def test_choose_ranges_when_calls_differ_widely_then_no_range_is_clipped():
    model, data = Reader(1.0), images(8, seed=1, spread=1.0, outlier=3.0)
    fast, gm = converted(model, data, "fast"), converted(model, data, "balanced")
    assert [r.scale for r in pq.provenance_of(gm).tensors] == [
        r.scale for r in pq.provenance_of(fast).tensors
    ]


def _sampled(count):
    """The calls of the random sample that algorithms keep."""
    calls = KeptCalls()
    watched = KeptInputs(calls)
    for number in range(count):
        watched(number)
    return calls.places


@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
def test_choose_ranges_when_few_calls_are_large_then_no_worse_than_observed(backend):
    model = Reader(1.0)
    data = images(64, seed=1, outlier=0.0)
    for place in [n for n in range(64) if n not in _sampled(64)][:4]:
        data[place] = data[place] * 12
    observed = converted(model, data, "fast", backend)
    chosen = converted(model, data, "balanced", backend)
    assert sqnr(model, chosen, data) > sqnr(model, observed, data) - 0.1


@pytest.mark.parametrize("contrast", [1.0, 4.0])
def test_whole_model_when_calls_differ_widely_then_one_that_exceeds_them_counts(contrast):
    data = images(8, seed=0, outlier=0.0)
    data[0::2] = [x * contrast for x in data[0::2]]  # those that set other ranges
    prepared = calibrated(Reader(1.0), data)
    take_statistics(prepared, prepared_state(prepared).algorithms)
    groups = range_groups(prepared)
    judged = [([x], 1.0) for x in data[1::2]]
    calls = Calls(fitted=[[x] for x in data[0::2]], judged=judged, unseen=[])
    chooser = _Chooser(prepared, groups, calls, progress=False)
    with torch.no_grad():
        chooser.fit()
        group = next(iter(chooser.group_of.values()))
        chooser.judge()
        seen = group.qparams[AS_OBSERVED]
        group.qparams["judged calls"] = replace(seen, scale=seen.scale / contrast)
        choices = [{}, {id(group.observer): "judged calls"}]
        observed, tight = chooser._whole(choices, chooser.compared)
    # A range of the judged calls alone has steps a fourth as large, and clips what exceeds them.
    assert tight.db == observed.db if contrast == 1.0 else tight.db < observed.db - 3


def test_choose_ranges_when_run_twice_then_the_same_bits():
    model, data = Reader(0.0), images(9, seed=1)
    found = [converted(model, data, "balanced") for _ in range(2)]
    assert torch.equal(*(gm(data[0]) for gm in found))


def test_choose_ranges_when_effort_is_fast_then_nothing_is_kept_or_changed():
    data = images(8, seed=1)
    program = torch.export.export(Reader(0.0), (data[0],))
    quantizer = pq.backends.get("onnx").quantizer("int8")
    fast = pq.prepare_pt2e(program, quantizer, effort="fast")
    for name in ("choose_ranges", "block_gptq", "keep_float", "bias_correction"):
        quantizer.remove_algorithm(name)
    plain = pq.prepare_pt2e(program, quantizer)
    assert [str(n) for n in plain.graph.nodes] == [str(n) for n in fast.graph.nodes]
    assert not any(isinstance(m, KeptInputs) for m in fast.modules())
    made = [pq.convert_pt2e(pq.calibrate(p, data, progress=False)) for p in (plain, fast)]
    assert torch.equal(*(gm(data[0]) for gm in made))


@pytest.mark.parametrize("backend", ["onnx", "xnnpack", "cpu"])
def test_choose_ranges_when_no_effort_is_named_then_a_static_recipe_is_balanced(backend):
    model, data = Reader(0.0), images(8, seed=1)
    default, gm = (converted(model, data, effort, backend) for effort in (None, "balanced"))
    assert torch.equal(default(data[0]), gm(data[0]))
    assert input_record(default).evidence == input_record(gm).evidence != ""


def test_choose_ranges_when_no_effort_is_named_then_observers_of_the_user_stay():
    model, data = Reader(0.0), images(8, seed=1)
    default = converted(model, data, None, activation=MinMaxObserver)
    fast = converted(model, data, "fast", activation=MinMaxObserver)
    assert torch.equal(default(data[0]), fast(data[0]))


def test_choose_ranges_when_no_effort_is_named_then_other_recipes_and_no_data_are_no_error():
    data = [torch.randn(4, 32)]
    assert isinstance(converted(nn.Linear(32, 32), data, None, recipe="w8")(data[0]), torch.Tensor)


def test_choose_ranges_when_others_are_no_better_on_unseen_calls_then_as_observed_with_both():
    # The calls that set and judge are alike; in those that confirm, the outliers count.
    model, calm = Reader(1.0), images(16, seed=1, outlier=3.0)
    prepared = calibrated(model, [*calm, 8 * calm[0]])
    take_statistics(prepared, prepared_state(prepared).algorithms)
    groups = range_groups(prepared)
    wide, parts = [([8 * x], 1.0) for x in calm[:4]], [[x] for x in calm]
    calls = Calls(fitted=parts[:6], judged=[(c, 1.0) for c in parts[6:12]], unseen=wide)
    with torch.no_grad():
        for unseen in ([(c, 1.0) for c in parts[12:]], wide):
            chooser = _Chooser(prepared, groups, replace(calls, unseen=unseen), progress=False)
            chooser.fit()
            chooser.judge()
            assert any(name != AS_OBSERVED for name in chooser.tried()[-1].values())
            choice, text = chooser.confirmed()
            changed = any(name != AS_OBSERVED for name in choice.values())
            assert changed == (unseen is not wide)
            assert text.startswith("ranges are as observed: on 4 calls") != changed


@pytest.mark.parametrize("backend", ["onnx", "xnnpack", "cpu"])
def test_choose_ranges_when_a_map_is_returned_then_its_range_is_judged_as_well(backend):
    torch.manual_seed(0)
    model, data = nn.Conv2d(CHANNELS, 4, 1), images(8, seed=1, outlier=0.0)
    gm = converted(model, data, "balanced", backend)
    returned = [r for r in pq.provenance_of(gm).tensors if r.name.startswith("conv2d")]
    assert returned == [] if backend == "cpu" else returned[0].evidence != ""


def test_choose_ranges_when_there_are_few_calls_then_as_observed_with_the_reason():
    model, data = Reader(0.0), images(5, seed=1)
    fast = converted(model, data, "fast")
    gm = converted(model, data, "balanced", left_out="keep_float")  # which these ranges spoil
    assert torch.equal(fast(data[0]), gm(data[0]))
    assert any("needs 6 calls, found 5" in note for note in pq.provenance_of(gm).notes)


def test_choose_ranges_when_all_tensors_are_vectors_then_as_observed_with_the_reason():
    data = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    gm = converted(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), data, "balanced")
    assert any("pooled features, logits or vectors" in note for note in pq.provenance_of(gm).notes)


def test_choose_ranges_when_there_was_no_data_then_refused():
    program = torch.export.export(Reader(0.0), (images(1, seed=1)[0],))
    quantizer = pq.backends.get("onnx").quantizer("int8")
    prepared = pq.prepare_pt2e(program, quantizer, effort="balanced")
    with pytest.raises(CalibrationError, match="choose_ranges needs calibration data"):
        pq.convert_pt2e(prepared)


def test_choose_ranges_when_no_activation_is_static_then_refused():
    with pytest.raises(ConfigError, match="choose_ranges applies to nothing that is quantized"):
        converted(nn.Linear(32, 32), [torch.randn(4, 32)], "balanced", recipe="w8")


@pytest.mark.parametrize("effort", ["fast", "balanced", "best"])
def test_effort_when_a_recipe_leaves_all_float_then_as_without_it(effort):
    program = torch.export.export(nn.Sequential(nn.Linear(8, 8)).eval(), (torch.ones(2, 8),))
    quantizer = pq.backends.get("onnx").quantizer("int8").set_operator("aten.linear", None)
    with pytest.warns(Pt2eQuantWarning, match="no tensor of this graph is to be quantized"):
        gm = pq.prepare_pt2e(program, quantizer, effort=effort, strict=False)
    assert not prepared_state(gm).observer_infos


def test_choose_ranges_when_the_effort_is_unknown_then_a_near_name_is_offered():
    with pytest.raises(ConfigError, match='there is no effort "balancd"'):
        converted(Reader(0.0), images(4, seed=1), "balancd")


def test_choose_ranges_when_a_user_chose_observers_then_theirs_are_open_as_well():
    model, data = Reader(0.0), images(8, seed=1)
    gm = converted(model, data, "balanced", activation=MinMaxObserver)
    assert not input_record(gm).evidence.startswith("as observed")


def test_choose_ranges_when_biases_derive_from_a_range_then_they_follow():
    model, data = Reader(0.0), images(8, seed=1)
    gm = converted(model, data, "balanced", "onnx")
    table = pq.provenance_of(gm)
    bias, weight = (table.tensor(f"conv.{name}") for name in ("bias", "weight"))
    expected = [s * input_record(gm).scale[0] for s in weight.scale]
    assert bias.scale == pytest.approx(expected, rel=1e-6)


class Counter(nn.Module):
    """Adds to a buffer at each call."""

    def __init__(self):
        super().__init__()
        self.reader = Reader(0.0)
        self.register_buffer("total", torch.zeros(4, 16, 16))

    def forward(self, x):
        y = self.reader(x)
        self.total.add_(y[0])
        return y + self.total


def test_choose_ranges_when_the_graph_writes_a_buffer_then_it_stays_as_it_was():
    data = images(8, seed=1)
    gm = converted(Counter(), data, "balanced")
    assert not input_record(gm).evidence.startswith("as observed")
    assert torch.equal(gm.get_buffer("total"), torch.zeros(4, 16, 16))


def test_choose_ranges_when_a_foreign_quantizer_is_given_an_effort_then_its_ranges_are_open():
    pytest.importorskip("executorch")
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    model, data, held_out = Reader(0.0), images(8, seed=1, outlier=1e4), images(8, seed=2)
    program = torch.export.export(model, (data[0],))

    def made(effort):
        quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
        prepared = pq.prepare_pt2e(program, quantizer, effort=effort)
        return pq.convert_pt2e(pq.calibrate(prepared, data, progress=False))

    fast, gm = made("fast"), made("balanced")
    assert all(not record.evidence for record in pq.provenance_of(fast).tensors)
    assert any(record.evidence for record in pq.provenance_of(gm).tensors)
    assert sqnr(model, gm, held_out) >= sqnr(model, fast, held_out)


def test_choose_ranges_when_a_prepared_graph_is_saved_then_the_choice_is_the_same(tmp_path):
    model, data = Reader(0.0), images(8, seed=1)
    prepared = calibrated(model, data)
    pq.save(prepared, tmp_path / "prepared.qpt2")
    expected = pq.convert_pt2e(copy.deepcopy(prepared))
    found = pq.convert_pt2e(pq.load(tmp_path / "prepared.qpt2"))
    assert torch.equal(found(data[0]), expected(data[0]))


def test_choose_ranges_when_named_as_algorithm_then_as_balanced():
    model, data = Reader(0.0), images(8, seed=1)
    program = torch.export.export(model, (data[0],))
    quantizer = pq.backends.get("onnx").quantizer("int8").allowing("slower")
    prepared = pq.prepare_pt2e(program, quantizer, algorithms=[ChooseRanges()])
    gm = pq.convert_pt2e(pq.calibrate(prepared, data, progress=False))
    assert torch.equal(gm(data[0]), converted(model, data, "balanced")(data[0]))


@pytest.mark.parametrize("seen", [6, 8, 16, 32, 64])
def test_choose_ranges_when_balanced_then_at_most_three_runs_of_each_call(seen, monkeypatch):
    runs, call = [], ObservedRun.call
    monkeypatch.setattr(
        ObservedRun, "call", lambda self, inputs: runs.append(1) or call(self, inputs)
    )
    converted(Reader(0.0), images(seen, seed=1), "balanced")
    # Weights take 20 of them at most, and `keep_float` two.
    assert 0 < len(runs) <= min(3 * seen, 100) + keep_float.MOST_CALLS


def test_choose_ranges_when_a_layer_has_many_outputs_then_some_are_compared(monkeypatch):
    sizes, energy = [], choose_ranges.energy
    monkeypatch.setattr(choose_ranges, "energy", lambda x: sizes.append(x.shape[1]) or energy(x))
    model = Reader(0.0)
    model.conv, model.after = nn.Conv2d(CHANNELS, 100, 3), nn.Conv2d(100, 4, 1)
    gm = converted(model, images(8, seed=1), "balanced")
    assert 100 not in sizes
    assert 17 in sizes  # every sixth of 100
    assert any(record.evidence for record in pq.provenance_of(gm).tensors)


@pytest.mark.usefixtures("integers_everywhere")
def test_choose_ranges_when_progress_is_asked_for_then_each_step_shows_it(monkeypatch):
    shown = []

    def show(calls, text, *, enabled):
        shown.append((text, enabled))
        return iter(calls)

    monkeypatch.setattr(choose_ranges, "show_progress", show)
    data = images(8, seed=1)
    pq.convert_pt2e(calibrated(Reader(0.0), data), progress=True)
    steps = "finding", "judging", "comparing", "confirming"
    assert shown == [(f"{step} ranges", True) for step in steps]
