"""Every result is a table: for pandas, as JSON, and in notebooks."""

import json

import pytest
import torch
from torch import nn
from torch.export import export

import pt2e_quant as pq


@pytest.fixture(scope="module")
def results():
    torch.manual_seed(0)
    batches = [(torch.randn(4, 8),) for _ in range(2)]
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    program = export(model, batches[0])
    quantizer = pq.backends.get("cpu").quantizer("int8")
    quantized = pq.convert(pq.calibrate(pq.prepare(program, quantizer), batches, progress=False))
    comparison = pq.compare(program, quantized, batches, progress=False)
    tuned = pq.tune(
        model, args=batches[0], calibration_data=batches, backend="cpu", target=0.5, progress=False
    )
    return {
        "comparison": (comparison, len(comparison.nodes)),
        "sensitivity": (
            costs := pq.sensitivity(program, quantized, batches, progress=False),
            len(costs),
        ),
        "profile": (profile := pq.profile(quantized, batches[0]), len(profile.nodes)),
        "advice": (advice := pq.advise(quantized, comparison), len(advice)),
        "tuned": (tuned, len(tuned.measured)),
        "tensors": (table := pq.tensor_values(quantized, batches), len(table.table().rows)),
        "report": (report := tuned.artifact.report, len(report.provenance.tensors)),
    }


NAMES = ("comparison", "sensitivity", "profile", "advice", "tuned", "tensors", "report")


@pytest.mark.parametrize("name", NAMES)
def test_result_when_asked_then_it_is_a_table_of_each_kind(results, name):
    found, count = results[name]
    assert len(found.to_pandas()) == count
    assert isinstance(json.loads(found.to_json()), dict)
    assert found._repr_html_().lstrip().startswith("<")


def test_profile_to_pandas_when_grouped_then_shares_sum_up(results):
    frame = results["profile"][0].to_pandas()
    assert {"node", "module", "kernel", "kind", "bytes", "operations", "time_us"} <= {*frame}
    assert frame["share"].sum() == pytest.approx(1)


def test_tuned_to_pandas_when_read_then_says_which_mix_was_chosen(results):
    tuned, _ = results["tuned"]
    frame = tuned.to_pandas()
    assert frame["is_front"].sum() == len(tuned.front)
    assert frame[frame["is_chosen"]]["metric"].iloc[0] == tuned.metric
