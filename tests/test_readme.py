"""README and docs say what is true: code runs, commands exist, generated tables are fresh."""

import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from pt2e_quant.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "guide.md"
RUNTIMES = ("executorch", "onnxruntime", "onnxscript")


def blocks(page, language):
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def unmeasured():
    """What pages show works whatever was measured on this machine: nothing is taken out."""


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    for package in RUNTIMES:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return tmp_path


@pytest.fixture
def verified_in_new_processes(monkeypatch):
    """Every artifact that a page makes is also loaded in a new process, and run at other sizes."""
    for backend in ("cpu", "onnx", "xnnpack"):
        lower = importlib.import_module(f"pt2e_quant.backends.{backend}.lower")
        monkeypatch.setattr(lower, "loader_of", lambda verify, name: name if verify else None)


@pytest.mark.usefixtures("verified_in_new_processes")
@pytest.mark.parametrize("page", [README, GUIDE], ids=lambda p: p.name)
def test_python_blocks_of_a_page_run_in_order(page, empty_folder, capsys):
    names = {"__name__": page.stem}
    found = blocks(page, "python")
    assert found
    for number, block in enumerate(found):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    assert (empty_folder / "model.onnx").is_file()


def test_console_commands_of_the_guide_run(empty_folder, capsys):
    code = "\n".join(blocks(GUIDE, "python"))
    setup = code[: code.index("prepared =")] + code[code.rindex("import numpy") :]
    exec(compile(setup, "guide.md", "exec"), {"__name__": "guide"})
    commands = [
        shlex.split(line.removeprefix("$ "), comments=True)
        for block in blocks(GUIDE, "console")
        for line in block.splitlines()
    ]
    assert [command[1] for command in commands] == ["quantize", "inspect", "run", "bench"]
    for command in commands:
        assert command[0] == "pt2e-quant"
        with pytest.raises(SystemExit) as caught:
            main(command[1:])
        assert not caught.value.code, capsys.readouterr().err
    assert (empty_folder / "results.npz").is_file()


def test_the_first_two_shell_blocks_are_the_two_commands():
    run, test = blocks(README, "sh")[:2]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for command in (run, test):
        assert command.count("\n") == 1
        wanted = re.search(r"pip install -e '\.\[([\w,]+)\]'", command)
        assert set(wanted.group(1).split(",")) <= set(extras)
    script = re.search(r"python (examples/\S+)", run).group(1)
    assert (ROOT / script).is_file()
    assert test.rstrip().endswith("&& pytest -n auto --dist loadfile")


def test_generated_pages_are_up_to_date():
    done = subprocess.run(
        [sys.executable, "docs/generate.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"run python docs/generate.py: {done.stdout}{done.stderr[-2000:]}"


def test_every_error_class_is_explained():
    text = (ROOT / "docs" / "errors.md").read_text()
    source = (ROOT / "pt2e_quant" / "core" / "errors.py").read_text()
    for name in re.findall(r"^class (\w+)\(", source, re.MULTILINE):
        assert f"`{name}`" in text or f"`pt2e_quant.{name}`" in text
