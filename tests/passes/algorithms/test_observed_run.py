"""Runs with other values in the place of observers, and the error they make at the output."""

from math import inf, log10

import pytest
import torch

from pt2e_quant.core.qparams import QParams
from pt2e_quant.passes.algorithms.observed_run import (
    ObservedRun,
    OutputError,
    energy,
    floats,
    rounded_by,
)


@pytest.mark.parametrize(("scale", "zero_point"), [(0.013, 3), (0.5, -128), (1e-9, 127)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounded_by_when_values_fit_or_clip_then_as_quantize_and_dequantize(
    scale, zero_point, dtype
):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    qparams = QParams(
        scale=torch.tensor([scale]),
        zero_point=torch.tensor([zero_point], dtype=torch.int32),
        quant_min=-128,
        quant_max=127,
        dtype=torch.int8,
    )
    exact = torch.fake_quantize_per_tensor_affine(x.float(), scale, zero_point, -128, 127)
    found = rounded_by(qparams, x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, exact.to(dtype), rtol=1e-6, atol=0)


def _error(noises):
    return OutputError([1.0] * len(noises), noises)


def test_output_error_when_calls_are_added_then_weighted_and_together():
    error = OutputError()
    error.add([torch.ones(4)], [torch.ones(4) + 0.1], 2.0)
    error.add([torch.ones(4)], [torch.ones(4)], 1.0)
    assert error.db == pytest.approx(10 * log10(12 / (2 * 4 * 0.01)))
    assert (error + error).db == pytest.approx(error.db)
    assert OutputError().db == inf


def test_energy_when_numbers_are_complex_then_of_both_parts():
    (value,) = floats([torch.full((3,), 1 + 2j), torch.ones(2, dtype=torch.int64)])
    assert value.dtype == torch.float32
    assert energy(value) == pytest.approx(15)
    assert energy(torch.full((3,), 1 + 2j)) == pytest.approx(15)


def test_sure_gain_when_each_call_gains_the_same_then_all_of_it():
    before = _error([1.0, 2.0, 3.0, 4.0])
    assert _error([0.5, 1.0, 1.5, 2.0]).sure_gain(before) == pytest.approx(10 * log10(2))


def test_sure_gain_when_one_call_makes_the_gain_then_none():
    before, after = _error([1.0, 1.0, 1.0, 10.0]), _error([1.2, 1.2, 1.2, 5.0])
    assert after.db > before.db + 1
    assert after.sure_gain(before) < 0


def _returned(gm):
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    return output.all_input_nodes


class Counter(torch.nn.Module):
    """Adds a weight, twice the input and the number of calls before."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x, scale):
        self.count += 1
        return {"sum": (x * scale + self.weight, self.count.clone())}


def test_observed_run_when_called_again_then_from_the_models_state_and_nothing_is_left():
    x = torch.ones(2)
    gm = torch.export.export(Counter(), (x, 2.0)).module()
    run = ObservedRun(gm, lambda node, value: value)
    for _ in range(2):
        summed, count = run.call([x, 2.0])
        assert summed.tolist() == [3.0, 4.0]
        assert count.item() == 1
    assert [node for node in run.env if node.op == "call_function"] == [*_returned(gm)]
    assert next(gm.buffers()).item() == 0


def test_observed_run_when_a_graph_has_observers_then_each_is_asked():
    gm = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)).module()
    (linear,) = (n for n in gm.graph.nodes if n.op == "call_function" and n.users)
    gm.add_submodule("observer", torch.nn.Identity())
    with gm.graph.inserting_after(linear):
        observed = gm.graph.call_module("observer", (linear,))
    linear.replace_all_uses_with(observed, lambda user: user is not observed)
    (found,) = ObservedRun(gm, lambda node, value: value * 0).call([torch.ones(1, 2)])
    assert torch.equal(found, torch.zeros(1, 2))


def test_output_error_when_values_decide_a_size_and_it_differs_then_the_result_is_all_noise():
    error = OutputError()
    error.add([torch.ones(4), torch.ones(3)], [torch.ones(4), torch.ones(2)], 1.0)
    assert error.db == pytest.approx(10 * log10(7 / 3))


def test_gain_in_calls_when_one_call_has_most_noise_then_each_call_counts_alike():
    before, after = _error([100.0, 1.0, 1.0, 1.0]), _error([120.0, 0.5, 0.5, 0.5])
    assert after.db < before.db
    expected = (3 * 10 * log10(2) - 10 * log10(1.2)) / 4
    assert after.gain_in_calls(before) == pytest.approx(expected)


def test_gain_in_calls_when_standard_errors_are_asked_for_then_taken_off():
    before, after = _error([1.0, 1.0]), _error([0.1, 1.0])
    assert after.gain_in_calls(before) == pytest.approx(5.0)
    assert after.gain_in_calls(before, errors=1.0) == pytest.approx(0.0)
    assert _error([1.0]).gain_in_calls(_error([10.0]), errors=3.0) == pytest.approx(10.0)
