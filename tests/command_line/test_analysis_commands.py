import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import export, save

import pt2e_quant as pq
from pt2e_quant.__main__ import main
from pt2e_quant.backends.target.recipe_file import read_recipe
from tests.analysis.outlier_transformer import POOR, batches, transformer

pytestmark = pytest.mark.usefixtures("integers_everywhere")


def call(*arguments):
    """The exit status of a command."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code or 0


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """float.pt2, data.npz, poor.toml, and mixed.onnx with mixed.toml by the command tune."""
    folder = tmp_path_factory.mktemp("analysis")
    data = batches(2)
    save(export(transformer(), (data[0],)), folder / "float.pt2")
    np.savez(folder / "data.npz", x=torch.cat(data).numpy())
    POOR.save(folder / "poor.toml")
    return folder


@pytest.fixture
def folder(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


TUNE = ("tune", "float.pt2", "--backend", "onnx", "--calibration-data", "data.npz")
TUNED = (*TUNE, "--recipe", "poor.toml", "--target", "0.9995", "--points", "0", "-o", "mixed.onnx")


def test_commands_when_a_model_is_tuned_then_each_looks_at_it(folder, capsys):
    assert call(*TUNED, "--save-recipe", "mixed.toml", "--json", "--fail-under", "0.9995") == 0
    tuned = json.loads(capsys.readouterr().out)
    assert tuned["schema"] == "pt2e-quant/tune/1"
    assert tuned["metric"] >= 0.9995
    assert read_recipe("mixed.toml").rules
    asked = ("compare", "mixed.onnx", "--against", "float.pt2", "--inputs", "data.npz", "--json")
    assert call(*asked, "--fail-under", "25") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "pt2e-quant/compare/1"
    assert found["sqnr_db"] > 25
    assert call(*asked, "--fail-under", "90") == 1
    assert "below --fail-under 90" in capsys.readouterr().err
    assert call("profile", "mixed.onnx", "--inputs", "data.npz", "--json") == 0
    profile = json.loads(capsys.readouterr().out)
    assert profile["schema"] == "pt2e-quant/profile/1"
    assert {"integer", "convert"} <= {*profile["by_kind_us"]}
    assert call("report", "mixed.onnx", "--inputs", "data.npz", "-o", "page.html") == 0
    assert "wrote page.html" in capsys.readouterr().out
    assert "Where the time goes" in (folder / "page.html").read_text()
    asked = ("report", "mixed.onnx", "--against", "float.pt2", "-o", "page.html")
    assert call(*asked) == 1
    assert "need --inputs" in capsys.readouterr().err
    assert call(*asked, "--inputs", "data.npz") == 0
    assert "Which tensors hurt most" in (folder / "page.html").read_text()


def test_compare_when_a_pte_is_given_then_results_alone_unless_its_graph_is_named(folder, capsys):
    pytest.importorskip("executorch")
    x = torch.randn(4, 16)
    program = export(nn.Sequential(nn.Linear(16, 8), nn.ReLU()).eval(), (x,))
    prepared = pq.prepare(program, pq.backends.get("xnnpack").quantizer("int8"))
    graph = pq.convert(pq.calibrate(prepared, [x], progress=False))
    save(program, folder / "linear.pt2")
    np.savez(folder / "x.npz", x.numpy())
    pq.backends.get("xnnpack").lower(graph, verify=False).save(folder / "linear.pte")
    pq.save(graph, folder / "linear.ptq")
    asked = ("compare", "linear.pte", "--against", "linear.pt2", "--inputs", "x.npz", "--json")
    assert call(*asked, "--fail-under", "20") == 0
    alone = json.loads(capsys.readouterr().out)
    assert not alone["nodes"]
    assert call(*asked, "--quantized", "linear.ptq") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nodes"]
    assert found["sqnr_db"] == alone["sqnr_db"] > 20


def test_sensitivity_when_asked_for_json_then_every_group(folder, capsys):
    asked = ("sensitivity", "float.pt2", "--inputs", "data.npz", "--backend", "onnx")
    assert call(*asked, "--recipe", "poor.toml", "--method", "gradient", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "pt2e-quant/sensitivity/1"
    worst = max(found["groups"], key=lambda group: group["cost"])
    assert worst["module"].startswith("blocks.1")


def test_tune_when_no_goal_is_given_then_an_error_of_ours(folder, capsys):
    assert call(*TUNE) == 1
    assert "one of target, accuracy_drop and budget" in capsys.readouterr().err


def test_tune_when_no_mix_is_as_fast_as_asked_then_names_the_fastest(folder, capsys):
    asked = (*TUNE, "--budget-latency-us", "0.5", "--method", "weight", "--points", "0")
    assert call(*asked, "--json") == 1
    out, err = capsys.readouterr()
    assert not out
    assert "the fastest measured takes" in err


def test_report_when_given_a_float_program_then_what_is_known_of_it(folder, capsys):
    assert call("report", "float.pt2", "-o", "float.html", "--json") == 0
    assert json.loads(capsys.readouterr().out)["report"]["backend"] == "torch.export program"
    assert call("report", "float.pt2", "-o", "float.html", "--inputs", "data.npz") == 1
    assert "takes no data" in capsys.readouterr().err


def test_commands_when_batches_have_labels_then_pick_takes_the_inputs(folder, capsys):
    pairs = [(batch, torch.zeros(len(batch))) for batch in batches(2)]
    torch.save(pairs, folder / "pairs.pt")
    weigh = ("sensitivity", "float.pt2", "--backend", "onnx", "--inputs", "pairs.pt", "--json")
    assert call(*weigh) == 1
    refused = capsys.readouterr()
    assert refused.out == ""
    assert "--pick 0" in refused.err
    assert "inputs=" not in refused.err
    assert call(*weigh, "--pick", "0") == 0
    assert json.loads(capsys.readouterr().out)["groups"]
    assert call(*weigh, "--pick", "1") == 1
    assert "what inputs=1 picks does not fit" in capsys.readouterr().err


def test_tune_when_the_file_is_of_another_backend_then_refused_before_the_search(folder, capsys):
    assert call(*TUNE, "--target", "0.9", "-o", "mixed.pte") == 1
    assert "-o mixed.onnx" in capsys.readouterr().err
    assert not (folder / "mixed.pte").exists()
