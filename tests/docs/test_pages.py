"""Code of the documentation runs, commands exist, and every error class is explained."""

import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pt2e_quant.__main__ import main
from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.target.lower import Lowering

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README, COMMANDS = ROOT / "README.md", DOCS / "how_to" / "command_line.md"
RUNTIMES = ("executorch", "onnxruntime", "onnxscript", "transformers", "sklearn")
IN_NEW_PROCESSES = {
    README,
    DOCS / "guide.md",
    DOCS / "tutorials" / "deploy_pte.md",
    DOCS / "tutorials" / "deploy_onnx.md",
}
"""Pages whose artifacts are loaded in a new process too: ten seconds for each."""
OF_ONE_SIZE = {DOCS / "tutorials" / "language_model.md"}
OWN_TEST = {DOCS / "migration.md"}  # tests/test_migration.py compares code before and after


def blocks(page, language):
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def setup_of(page):
    """The first example of the page that this one's metadata names as its setup, if any."""
    found = re.match(r"---\nsetup: (\S+)\n---\n", page.read_text())
    return blocks(DOCS / found[1], "python")[:1] if found else []


def pages_with_code():
    """Every page with Python code, and the README."""
    found = [README, *sorted(DOCS.glob("**/*.md"))]
    return [page for page in found if page not in OWN_TEST and blocks(page, "python")]


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    for package in RUNTIMES:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return tmp_path


def verify_in_new_processes(monkeypatch):
    """Have every artifact loaded in a new process as well, and run there at other sizes."""
    lower = Lowering.lower

    def lower_in_new_process(self, gm, example_inputs, options):
        verify = "process" if options.verify else False
        return lower(self, gm, example_inputs, replace(options, verify=verify))

    monkeypatch.setattr(Lowering, "lower", lower_in_new_process)


def takes_other_sizes(artifact):
    """Whether a call may have other sizes than the example's, and so was run at them."""
    return any(isinstance(size, str) for info in artifact.capture.inputs for size in info.shape)


@pytest.mark.usefixtures("empty_folder")
@pytest.mark.parametrize("page", pages_with_code(), ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_when_run_in_order_then_they_work(page, monkeypatch, capsys):
    if page in IN_NEW_PROCESSES:
        verify_in_new_processes(monkeypatch)
    names = {"__name__": page.stem}
    for number, block in enumerate([*setup_of(page), *blocks(page, "python")]):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
        left = [value for value in names.values() if isinstance(value, Artifact)]
        if page not in OF_ONE_SIZE:
            assert all(takes_other_sizes(artifact) for artifact in left), f"block {number}"


def test_python_blocks_when_written_then_at_the_margin_where_tests_look():
    for page in DOCS.glob("**/*.md"):
        assert not re.search(r"^[ \t]+```python|^```(py|python3|Python)\n", page.read_text(), re.M)


def test_console_commands_when_run_then_they_work(empty_folder, capsys):
    names = {"__name__": "command_line"}
    for block in [*setup_of(COMMANDS), *blocks(COMMANDS, "python")]:
        exec(compile(block, COMMANDS.name, "exec"), names)
    commands = [
        shlex.split(line.removeprefix("$ "), comments=True)
        for block in blocks(COMMANDS, "console")
        for line in block.splitlines()
    ]
    assert [command[1] for command in commands] == ["quantize", "inspect", "run", "bench"]
    for command in commands:
        assert command[0] == "pt2e-quant"
        with pytest.raises(SystemExit) as caught:
            main(command[1:])
        assert not caught.value.code, capsys.readouterr().err
    assert (empty_folder / "results.npz").is_file()


def test_readme_when_read_then_its_first_shell_blocks_run_and_test():
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


def test_errors_page_when_read_then_every_error_class_is_explained():
    text = (ROOT / "docs" / "errors.md").read_text()
    source = (ROOT / "pt2e_quant" / "core" / "errors.py").read_text()
    for name in re.findall(r"^class (\w+)\(", source, re.MULTILINE):
        assert f"`{name}`" in text or f"`pt2e_quant.{name}`" in text
