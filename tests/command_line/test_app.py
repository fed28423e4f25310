import json
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pt2e_quant.__main__ import main
from pt2e_quant.backends.cpu import policy
from pt2e_quant.backends.registry import get
from pt2e_quant.backends.target.recipe import ALIASES
from pt2e_quant.command_line.program_file import load_program
from pt2e_quant.core.effort import Effort
from pt2e_quant.core.errors import Pt2eQuantWarning
from pt2e_quant.flow.calibrate import calibrate_by_block as by_block


def call(*arguments):
    """The exit status of a command."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    return caught.value.code or 0


QUANTIZE = ("quantize", "model.pt2", "--backend", "plain", "--calibration-data", "data.npz")


def test_quantize_when_done_then_writes_the_file_and_a_summary(folder, plain_backend, capsys):
    assert call(*QUANTIZE, "-o", "out.plain", "--report", "report.json") == 0
    out, err = capsys.readouterr()
    assert "wrote out.plain" in out
    assert "quantized tensors" in out
    assert "not used: labels" in err
    assert len(json.loads((folder / "report.json").read_text())["provenance"]["tensors"]) == 6
    assert not [p for p in folder.iterdir() if "tmp" in p.name]


def test_quantize_when_batches_have_labels_then_inputs_picks(folder, plain_backend, capsys):
    (folder / "loader.py").write_text(
        "import torch\ndef batches():\n    return [(torch.ones(4, 4), torch.ones(4))]\n"
    )
    asked = [("loader:batches" if word == "data.npz" else word) for word in QUANTIZE]
    assert call(*asked, "-q") == 1
    assert "inputs=0" in capsys.readouterr().err
    assert call(*asked, "-q", "--inputs", "0") == 0


def test_quantize_when_a_search_is_asked_for_then_it_is_used(folder, plain_backend, capsys):
    assert call(*QUANTIZE, "-q", "--search", "minmax") == 1
    assert 'did you mean "min_max"' in capsys.readouterr().err
    assert call(*QUANTIZE, "-q", "--search", "mse") == 0


def test_quantize_when_an_algorithm_is_asked_for_then_it_is_used(folder, plain_backend, capsys):
    assert call(*QUANTIZE, "-q", "--algorithm", "gptg") == 1
    assert 'did you mean "gptq"' in capsys.readouterr().err
    assert call(*QUANTIZE, "-q", "--algorithm", "gptq") == 0


def test_quantize_when_resumed_then_by_block_with_a_state_that_is_used_again(
    folder, plain_backend, monkeypatch
):
    asked = (*QUANTIZE, "-q", "--algorithm", "gptq", "--resume", "state")
    run = ("run", "model.plain", "--inputs", "data.npz", "-q", "-o")
    assert call(*asked) == call(*run, "first.npz") == 0
    assert json.loads((folder / "state" / "state.json").read_text())["blocks"] == 2
    monkeypatch.setattr(by_block, "_optimise", None)  # no block is done again
    assert call(*asked) == call(*run, "second.npz") == 0
    first, second = (np.load(folder / name) for name in ("first.npz", "second.npz"))
    assert all(np.array_equal(first[key], second[key]) for key in first)


def test_quantize_when_resumed_without_data_then_refused(folder, plain_backend, capsys):
    asked = [word for word in QUANTIZE if word not in ("--calibration-data", "data.npz")]
    assert call(*asked, "-q", "--resume", "state") == 1
    assert "there is no calibration data" in capsys.readouterr().err


def test_quantize_when_an_effort_is_asked_for_then_the_algorithms_get_it(
    folder, plain_backend, monkeypatch
):
    given = []
    monkeypatch.setattr(
        "pt2e_quant.flow.prepare.prepare_pt2e.with_effort",
        lambda own, asked, effort: given.append(effort) or (own, asked),
    )
    assert call(*QUANTIZE, "-q", "--effort", "most") == 2
    assert call(*QUANTIZE, "-q", "--effort", "best") == 0
    assert given == [Effort.BEST]


def test_quantize_when_every_pass_is_to_be_validated_then_the_backend_is_told(
    folder, plain_backend, monkeypatch
):
    asked = []
    lower = type(plain_backend).lower

    def spy(self, gm, *arguments, **options):
        asked.append(options["validate"])
        return lower(self, gm, *arguments, **options)

    monkeypatch.setattr(type(plain_backend), "lower", spy)
    assert call(*QUANTIZE, "-q", "--validate") == 0
    assert call(*QUANTIZE, "-q") == 0
    assert asked == [True, False]


def test_quantize_when_kernels_are_unmeasured_then_needs_an_option(folder, capsys):
    asked = [("cuda" if word == "plain" else word) for word in QUANTIZE]
    asked = [word.replace(".plain", ".qcuda") for word in asked]
    assert call(*asked, "-q") == 1
    assert "--allow-unmeasured" in capsys.readouterr().err
    assert not (folder / "model.qcuda").exists()
    assert call(*asked, "-q", "--allow-unmeasured") == 0
    assert (folder / "model.qcuda").exists()


def test_quantize_when_layers_measured_slower_then_needs_an_option(
    folder, plain_backend, capsys, monkeypatch
):
    monkeypatch.setattr(policy, "measured_here", lambda op: SimpleNamespace(get=lambda *_: 0.5))
    asked = [("cpu" if word == "plain" else word) for word in QUANTIZE]
    with pytest.warns(Pt2eQuantWarning, match="--allow-slower"):
        assert call(*asked, "-q") == 0
    in_float = (folder / "model.qpt2").stat().st_size
    assert call(*asked, "-q", "--allow-slower") == 0
    assert (folder / "model.qpt2").stat().st_size != in_float
    assert call(*QUANTIZE, "-q", "--allow-slower") == 1
    assert "leave out --allow-slower" in capsys.readouterr().err


def test_quantize_when_groups_do_not_divide_then_the_option_pads_them(folder, capsys):
    asked = ("quantize", "model.pt2", "--backend", "cuda", "--recipe", "w4_g32")
    asked = (*asked, "--allow-unmeasured", "-q")
    assert call(*asked) == 1
    assert "--pad-groups" in capsys.readouterr().err
    assert call(*asked, "--pad-groups") == 0
    assert (folder / "model.qcuda").exists()


def test_quantize_when_quiet_then_output_named_after_the_model_and_no_text(
    folder, plain_backend, capsys
):
    assert call(*QUANTIZE, "--quiet", "--batch-size", "3") == 0
    assert (folder / "model.plain").is_file()
    assert capsys.readouterr() == ("", "")


def test_quantize_when_data_is_missing_then_says_how_to_give_it(folder, plain_backend, capsys):
    assert call("quantize", "model.pt2", "--backend", "plain") == 1
    err = capsys.readouterr().err
    assert "needs calibration data, and none was given" in err
    assert "--calibration-data data.npz" in err
    assert not (folder / "model.plain").exists()


def test_quantize_when_a_module_is_kept_float_then_inspect_says_so(folder, plain_backend, capsys):
    assert call(*QUANTIZE, "--keep-float", "0") == 0
    capsys.readouterr()
    assert call("inspect", "model.plain", "--json") == 0
    found = json.loads(capsys.readouterr().out)["provenance"]
    assert {t["name"] for t in found["tensors"]} == {"relu", "2.weight", "linear_1"}
    reasons = {f["node"]: f["reason"] for f in found["floats"]}
    assert "module_name" in reasons["linear"]


def test_inspect_when_given_an_artifact_then_shows_tensors_reasons_sizes(
    folder, plain_backend, capsys
):
    assert call(*QUANTIZE, "-q") == 0
    assert call("inspect", "model.plain") == 0
    out = capsys.readouterr().out
    for words in ("0.weight", "int8[-127,127] axis 0", "128 -> 128", "has no int8 form of it"):
        assert words in out


def test_run_when_given_an_artifact_then_near_the_float_program(folder, plain_backend, capsys):
    assert call(*QUANTIZE, "-q") == 0
    for name in ("model.plain", "model.pt2"):
        assert call("run", name, "--inputs", "data.npz", "-o", f"{name}.npz") == 0
    assert "(12, 3)" in capsys.readouterr().out
    expected = load_program(folder / "model.pt2").module()(
        torch.from_numpy(np.load("data.npz")["input"])
    )
    reference, found = np.load("model.pt2.npz")["out"], np.load("model.plain.npz")["out"]
    np.testing.assert_allclose(reference, expected.detach().numpy(), rtol=1e-5)
    error = np.abs(found - reference).max()
    # a few steps of the output's own scale, 1/255 of its range each
    assert 0 < error < 4 * np.ptp(reference) / 255


def test_bench_when_run_against_a_program_then_prints_the_ratio_and_json(
    folder, plain_backend, capsys
):
    assert call(*QUANTIZE, "-q") == 0
    command = ("bench", "model.plain", "--against", "model.pt2", "--rounds", "3")
    assert call(*command) == 0
    out = capsys.readouterr().out
    assert "3 rounds in turn, 1 thread" in out
    # The distance of results of noise says nothing about the model.
    assert "dB SQNR" not in out
    assert "the inputs were noise" in out
    assert call(*command, "--inputs", "data.npz") == 0
    assert "dB SQNR" in capsys.readouterr().out
    assert call(*command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["sqnr_db"] is None
    assert call(*command, "--json", "--inputs", "data.npz") == 0
    found = json.loads(capsys.readouterr().out)
    medians = [found["files"][name]["median_us"] for name in ("model.plain", "model.pt2")]
    assert found["speed_up"] == pytest.approx(medians[1] / medians[0])
    assert found["sqnr_db"] > 25


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("quantize", "gone.pt2", *QUANTIZE[2:]), "there is no file gone.pt2"),
        ((*QUANTIZE, "-o", "none/out.plain"), "cannot write none/out.plain"),
        ((*QUANTIZE, "-o", "out.pte"), 'backend "plain" writes .plain files'),
        ((*QUANTIZE, "--recipe", "int9"), 'did you mean "int8"'),
        ((*QUANTIZE, "--batch-size", "100"), "captured for 1 to 64"),
        ((*QUANTIZE, "--keep-float", "3"), 'matches "3"'),
        (("inspect", "data.npz"), 'no backend writes files that end in ".npz"'),
        (("inspect", "gone.plain"), "there is no file"),
        (("run", "model.pt2", "--inputs", "data.npz", "-o", "out.npy"), "results go to an .npz"),
        (("bench", "model.pt2", "--against", "model.pt2"), "against itself"),
    ],
)
def test_command_when_it_fails_then_text_without_a_traceback(
    folder, plain_backend, capsys, arguments, words
):
    assert call(*arguments) == 1
    out, err = capsys.readouterr()
    assert words in err
    assert "Traceback" not in out + err
    assert not list(folder.glob("*out*"))


@pytest.mark.parametrize(
    "arguments", [(), ("quantise",), ("quantize", "model.pt2"), ("bench", "a", "--rounds", "0")]
)
def test_command_when_its_usage_is_wrong_then_exits_with_2(folder, capsys, arguments):
    assert call(*arguments) == 2
    assert "Usage" in "".join(capsys.readouterr())


def test_module_when_run_with_python_m_then_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "pt2e_quant", "inspect", "gone.pt2"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.startswith("ArtifactError: there is no file gone.pt2")


@pytest.mark.parametrize(
    ("backend", "suffix", "package"),
    [("onnx", ".onnx", "onnxruntime"), ("xnnpack", ".pte", "executorch")],
)
def test_commands_when_the_backend_is_real_then_all_four_work(
    folder, capsys, backend, suffix, package
):
    pytest.importorskip(package)
    file = f"model{suffix}"
    assert call(*QUANTIZE[:3], backend, *QUANTIZE[4:], "-o", file) == 0
    assert call("inspect", file) == 0
    assert "0.weight" in capsys.readouterr().out
    assert call("run", file, "--inputs", "data.npz", "-o", "out.npz", "--batch-size", "5") == 0
    assert np.load("out.npz")["out"].shape == (12, 3)
    capsys.readouterr()
    command = ("bench", file, "--against", "model.pt2", "--rounds", "2", "--json")
    assert call(*command, "--inputs", "data.npz") == 0
    assert json.loads(capsys.readouterr().out)["sqnr_db"] > 25


def test_command_when_the_model_returns_a_class_then_asks_for_its_module(
    folder, plain_backend, capsys
):
    (folder / "my_result.py").write_text(RESULT_CLASS)
    script = "import my_result; my_result.save('classy.pt2')"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
    command = ("quantize", "classy.pt2", *QUANTIZE[2:], "--quiet")
    assert call(*command) == 1
    assert "--import my_result" in capsys.readouterr().err
    for again in (
        command,
        ("run", "classy.plain", "--inputs", "data.npz"),
        (
            "bench",
            "classy.plain",
            "--against",
            "classy.pt2",
            "--rounds",
            "1",
            "--inputs",
            "data.npz",
        ),
    ):
        assert call(*again, "--import", "my_result") == 0, capsys.readouterr().err
    assert "outputs agree" in capsys.readouterr().out
    assert call(*command, "--import", "my_resolt") == 1
    assert 'no module "my_resolt"' in capsys.readouterr().err


RESULT_CLASS = """
import dataclasses
import torch

@dataclasses.dataclass
class Result:
    logits: torch.Tensor

torch.utils._pytree.register_pytree_node(
    Result,
    lambda r: ([r.logits], None),
    lambda values, _: Result(*values),
    serialized_type_name="my_result.Result",
)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, *, input):
        return Result(self.linear(input))

def save(path):
    torch.export.save(torch.export.export(Model(), (), {"input": torch.randn(1, 4)}), path)
"""


def test_version_when_asked_then_the_package_and_torch_are_named(capsys):
    assert call("--version") == 0
    assert re.fullmatch(r"pt2e-quant \d+\.\d+\.\d+, torch \S+\n", capsys.readouterr().out)


def test_algorithms_when_asked_then_all_with_stage_data_and_paper(capsys):
    assert call("algorithms", "--json") == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)["algorithms"]}
    assert found["bias_correction"]["stage"] == "corrections"
    assert found["gptq"]["data"] == "statistics"
    assert found["cross_layer_equalization"]["data"] == "none"
    assert all(row["paper"] and row["fits"] and row["what"] for row in found.values())
    assert call("algorithms") == 0
    assert "adaround" in capsys.readouterr().out


def test_recipes_when_asked_then_every_backend_lists_its_own(capsys):
    assert call("recipes", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["recipes"]["cpu"]) == set(get("cpu").recipes)
    assert found["aliases"]["int4"] == "w4"
    assert found["cautions"] == {"cuda": "experimental: not yet measured on a GPU"}
    assert call("recipes", "cuda") == 0
    assert "cuda (experimental: not yet measured on a GPU)" in capsys.readouterr().out
    assert call("recipes", "xnnpack") == 0
    out = capsys.readouterr().out
    assert "int8_dynamic" in out
    assert out.count("a8w4") == 1 + out.count("= a8w4")
    assert "a8w4[_g<32,64,128,256>]" in out
    assert "other names: " in out


@pytest.mark.parametrize("backend", ["cpu", "cuda", "onnx", "xnnpack"])
def test_every_alias_when_a_backend_has_its_recipe_then_it_gives_it(backend):
    pytest.importorskip({"onnx": "onnxruntime", "xnnpack": "executorch"}.get(backend, "torch"))
    target = get(backend)
    for alias, name in ALIASES.items():
        assert alias not in target.recipes
        if name in target.recipes:
            assert str(target.quantizer(alias).scheme) == str(target.quantizer(name).scheme)


def test_inspect_when_the_file_is_missing_then_no_backend_is_imported(tmp_path):
    code = (
        "import sys\nfrom pt2e_quant.__main__ import main\n"
        "try:\n    main(['inspect', 'nofile.pte'])\n"
        "except SystemExit as stop:\n"
        "    loaded = [n.split('.') for n in sys.modules if n.startswith('pt2e_quant.backends.')]\n"
        "    print(stop.code, [n for n in loaded if n[-1] == 'backend' and n[-2] != 'target'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert done.stdout == "1 []\n"
    assert "there is no file nofile.pte" in done.stderr
