"""The repository's own rules: floors, folders, names, sizes."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("pt2e_quant", "passes", "kernels", "backends", "tests", "examples", "benchmarks", "docs")
LINKED = ("passes", "kernels", "backends")
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "base_impl"}


def python_files(*folders):
    """Every source file once: links are not followed."""
    for folder in folders:
        for here, names, files in os.walk(ROOT / folder):
            names[:] = [
                n for n in names if n != "__pycache__" and not (Path(here) / n).is_symlink()
            ]
            yield from (Path(here) / f for f in files if f.endswith(".py"))


ALL = sorted(python_files(*FOLDERS))


def shown(path):
    return str(path.relative_to(ROOT))


def test_imports_when_checked_then_floors_and_other_contracts_hold():
    pytest.importorskip("importlinter")
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", LINKED)
def test_package_when_a_top_folder_is_beside_it_then_links_to_it(name):
    link = ROOT / "pt2e_quant" / name
    assert link.is_symlink()
    assert os.readlink(link) == os.path.join("..", name)


def test_files_when_counted_then_none_is_too_long():
    lengths = {shown(p): len(p.read_text().splitlines()) for p in ALL}
    assert {p: n for p, n in lengths.items() if n > 400} == {}


def test_functions_when_counted_then_none_is_too_long():
    found = {}
    for path in ALL:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                # A signature of one argument a line is no work to read.
                length = (node.end_lineno or 0) - node.body[0].lineno + 1
                if length > 60 and not shown(path).startswith("tests"):
                    found[f"{shown(path)}:{node.name}"] = length
    assert found == {}


def test_files_when_named_then_none_is_private_or_named_for_nothing():
    private = [shown(p) for p in ALL if re.fullmatch(r"_[^_].*\.py", p.name)]
    assert private == []
    # The drop-in face has torchao's own file names.
    own = [p for p in ALL if "pt2e" not in p.relative_to(ROOT).parts]
    parts = {part for p in own for part in (*p.relative_to(ROOT).parts[:-1], p.stem)}
    assert parts & BANNED_NAMES == set()


OWN_ROOMS = {
    "benchmarks": "benchmarks/ stands beside the package",
    "digests": "recorded digests of whole lowerings",
    "docs": "docs/ stands beside the package",
    "faults": "environments that fail",
    "fuzz": "drawn models",
    "kernels/interpreted": "GPU kernels in Triton's interpreter, in processes of their own",
    "models": "whole models",
    "operators": "torch's samples of its operators",
    "zoo": "models of other packages",
}
"""Folders of tests that have no folder in the package, and what they are about."""


def test_tests_when_they_have_a_module_then_they_lie_beside_it():
    """`tests/a/b` is about `pt2e_quant/a/b`; a test file named after one module is about that."""
    package = ROOT / "pt2e_quant"
    homes: dict[str, set[str]] = {}
    for here, names, files in os.walk(package, followlinks=True):
        folder = Path(here).relative_to(package).as_posix()
        for unit in (*names, *(Path(f).stem for f in files if f.endswith(".py"))):
            homes.setdefault(unit, set()).add(folder)
        homes.setdefault(Path(here).name, set()).add(folder)
    homeless, strays = set(), {}
    for path in python_files("tests"):
        folder = path.parent.relative_to(ROOT / "tests").as_posix()
        unit = path.stem.removeprefix("test_")
        if any(f"{folder}/".startswith(f"{room}/") for room in OWN_ROOMS) or folder == ".":
            continue
        if not (package / folder).is_dir():
            homeless.add(folder)
        elif path.stem.startswith("test_") and folder not in homes.get(unit, {folder}):
            strays[shown(path)] = homes[unit]
    assert homeless == set()
    assert strays == {}


def test_tests_when_named_then_unit_condition_and_outcome_are_said():
    found = []
    for path in python_files("tests"):
        names = re.findall(r"^ *def (test_\w+)\(", path.read_text(), re.MULTILINE)
        found += [f"{shown(path)} {n}" for n in names if not re.search(r"_when_.+_then_.+", n)]
    assert found == []


def test_long_running_when_listed_then_each_is_a_test():
    listed = tomllib.loads((ROOT / "tests" / "long_running.toml").read_text())
    texts = {path: (ROOT / "tests" / path).read_text() for path in listed}
    unknown = [
        f"{path}::{test}"
        for path, tests in listed.items()
        for test, stride in tests.items()
        if f"def {test}(" not in texts[path] or stride < 2
    ]
    assert not unknown


def test_passes_when_read_then_each_says_what_it_needs_and_gives():
    """Both are written out, and a pass that reads values, itself or by a helper, needs them."""
    wrong = []
    for path in python_files("pt2e_quant", *LINKED):
        if path.name == "pipeline.py":
            continue
        tree = ast.parse(path.read_text())
        parts = {name: n for n in tree.body for name in names_of(n)}
        for part in tree.body:
            for node in ast.walk(part):
                name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if name not in ("graph_pass", "GraphPass"):
                    continue
                said = {k.arg: ast.unparse(k.value) for k in node.keywords}
                if not {"needs", "gives"} <= set(said) or (
                    reads_values(part, parts) and "HAS_VALUES" not in said["needs"]
                ):
                    wrong.append(f"{shown(path)}:{node.lineno}")
    assert wrong == []


def names_of(statement):
    """The names that a statement of a module defines, imports aside."""
    targets = getattr(statement, "targets", [getattr(statement, "target", None)])
    names = {getattr(statement, "name", None), *(getattr(t, "id", None) for t in targets)}
    return names - {None}


def reads_values(part, parts):
    """Whether what a module defines, or what of the module it names, reads `meta["val"]`."""
    reached, ahead = [part], [part]
    while ahead:
        named = {n.id for n in ast.walk(ahead.pop()) if isinstance(n, ast.Name)}
        found = [parts[n] for n in sorted(named & set(parts)) if parts[n] not in reached]
        reached += found
        ahead += found
    return any("meta['val']" in ast.unparse(p) for p in reached)


def test_passes_and_observers_when_listed_then_each_has_its_test_file():
    for folder in ("passes", "pt2e_quant/observers"):
        tests = ROOT / "tests" / Path(folder).name
        there = {p.name for p in tests.glob("test_*.py")}
        there |= {p.name for p in (ROOT / "tests").rglob("test_*.py")}
        wanted = {
            f"test_{p.stem}.py"
            for p in (ROOT / folder).glob("*.py")
            if p.stem not in ("__init__", "base", "terms") and defines_pass_or_class(p)
        }
        assert wanted - there == set()


def defines_pass_or_class(path):
    """Whether a file holds a graph pass or an observer, not only what several of them share."""
    text = path.read_text()
    return "@graph_pass" in text or "Observer(" in text


def test_modules_when_read_then_have_docstrings_and_absolute_imports():
    for path in ALL:
        tree = ast.parse(path.read_text())
        assert shown(path).startswith("tests") or ast.get_docstring(tree), shown(path)
        relative = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
        assert not relative, shown(path)


def test_docs_when_they_link_to_files_then_these_exist():
    docs = ROOT / "docs"
    # Some pages of the site's menu are made when it is built.
    menu = set(re.findall(r"(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    for page in [*ROOT.glob("*.md"), *docs.rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
            path = (page.parent / target).resolve()
            made = path.is_relative_to(docs) and str(path.relative_to(docs)) in menu
            assert path.exists() or made, f"{shown(page)} -> {target}"


def test_docstrings_when_they_list_arguments_then_each_exists():
    """`Args:` and `Attributes:` list parameters and fields by the names that these have."""
    wrong = []
    for path in python_files("pt2e_quant", *LINKED):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) or makes_its_own_init(node):
                listed = listed_arguments(ast.get_docstring(node) or "")
                unknown = sorted(listed - names_within(node)) if listed else []
                wrong += [f"{shown(path)}:{node.lineno} {name}" for name in unknown]
    assert wrong == []


def makes_its_own_init(node):
    """Whether a node is a class that is a dataclass, or has an `__init__` besides its base's."""
    if not isinstance(node, ast.ClassDef):
        return False
    made = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
    return "__init__" in made or any("dataclass" in ast.unparse(d) for d in node.decorator_list)


def listed_arguments(docstring):
    """The names under `Args:` and `Attributes:`."""
    found = set()
    for section in re.findall(r"^(?:Args|Attributes):\n((?: .*\n|\n)+)", f"{docstring}\n", re.M):
        for names in re.findall(r"^ {4}(?=\S)([\w*, ]+):", section, re.M):
            found |= {name.strip(" *") for name in names.split(",")}
    return found


def names_within(node):
    """The parameters and attributes that a function or class names; those of its bases aside."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            found.add(part.arg)
        elif isinstance(part, ast.Attribute):
            found.add(part.attr)
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            found.add(part.id)
        elif isinstance(part, ast.FunctionDef):
            found.add(part.name)
    return found
