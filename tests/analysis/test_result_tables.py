"""Every result is a table: for pandas, as JSON, and in notebooks."""

import json
from pathlib import Path

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
    backend = pq.backends.get("cpu").allowing_slower()
    quantizer = backend.quantizer("int8")
    quantized = pq.convert(pq.calibrate(pq.prepare(program, quantizer), batches, progress=False))
    comparison = pq.compare(program, quantized, batches, progress=False)
    tuned = pq.tune(
        model,
        args=batches[0],
        calibration_data=batches,
        backend=backend,
        target=0.5,
        progress=False,
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
        "audit": (audit := pq.audit(_half_float(program, batches, backend)), len(audit.islands)),
        "parity": (parity := pq.verify_parity(tuned.artifact, batches), len(parity.nodes)),
    }


def _half_float(program, batches, backend):
    """A graph with one linear in float, which an audit lists."""
    quantizer = backend.quantizer("int8").set_module_name("2", None)
    prepared = pq.prepare(program, quantizer)
    return pq.convert(pq.calibrate(prepared, batches, progress=False))


PAGES = ("comparison", "sensitivity", "profile", "advice", "tuned", "tensors", "report")
NAMES = (*PAGES, "audit", "parity")
DOCUMENTED = Path(__file__).resolve().parents[2] / "docs" / "how_to" / "report_page.md"


@pytest.mark.parametrize("name", NAMES)
def test_result_when_asked_then_it_is_data_of_each_kind(results, name):
    found, count = results[name]
    assert len(found.to_pandas()) == len(found.to_dicts()) == count > 0 or name == "advice"
    assert isinstance(json.loads(found.to_json()), dict)
    assert f"| `{type(found).__name__}` |" in DOCUMENTED.read_text()


@pytest.mark.parametrize("name", PAGES)
def test_result_when_shown_then_it_is_html(results, name):
    assert results[name][0]._repr_html_().lstrip().startswith("<")


def test_public_class_when_it_gives_pandas_then_it_is_among_the_results(results):
    public = {getattr(pq, name) for name in pq.__all__}
    tables = {found for found in public if isinstance(found, type) and hasattr(found, "to_pandas")}
    assert tables <= {type(found) for found, _ in results.values()}


def test_profile_to_pandas_when_grouped_then_shares_sum_up(results):
    frame = results["profile"][0].to_pandas()
    assert {"node", "module", "kernel", "kind", "bytes", "operations", "time_us"} <= {*frame}
    assert frame["share"].sum() == pytest.approx(1)


def test_tuned_to_pandas_when_read_then_says_which_mix_was_chosen(results):
    tuned, _ = results["tuned"]
    frame = tuned.to_pandas()
    assert frame["is_front"].sum() == len(tuned.front)
    assert frame[frame["is_chosen"]]["metric"].iloc[0] == tuned.metric
