"""The API reference has an entry for every public name, and the site names every page."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

import pt2e_quant

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site_pages():
    pytest.importorskip("mkdocs")
    for package in ("executorch", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def documented(site_pages):
    """The path of every object that the reference has an entry for, in order."""
    text = "\n".join(site_pages.made_pages().values())
    return re.findall(r"^::: (\S+)", text, re.MULTILINE)


@pytest.mark.parametrize(
    "path",
    ["pt2e_quant", "pt2e_quant.backends", "pt2e_quant.pt2e", "pt2e_quant.pt2e.quantizer"],
)
def test_reference_when_a_name_is_public_then_it_has_an_entry(path, site_pages, documented):
    module = importlib.import_module(path)
    paths = {site_pages.object_path(module, name) for name in site_pages.public_names(module)}
    assert paths
    assert paths <= set(documented)


def test_reference_when_there_is_a_backend_then_it_and_its_artifact_have_entries(documented):
    names = {path.rpartition(".")[2] for path in documented}
    for name in ("xnnpack", "onnx", "cpu", "cuda"):
        backend = type(pt2e_quant.backends.get(name)).__name__
        assert {backend, backend.replace("Backend", "Artifact")} <= names


def test_reference_when_two_modules_offer_an_object_then_one_entry(documented):
    assert len(documented) == len(set(documented))


def test_decisions_index_when_made_then_lists_each_and_explains_figures(site_pages):
    text = site_pages.made_pages()["decisions/index.md"]
    for page in (ROOT / "docs" / "decisions").glob("*.md"):
        assert f"]({page.name})" in text
    assert "single runs" in text


def test_menu_when_read_then_names_every_page_but_decisions(site_pages):
    menu = (ROOT / "mkdocs.yml").read_text()
    written = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").glob("**/*.md")}
    for page in written | set(site_pages.made_pages()):
        assert page.startswith("decisions/0") or re.search(rf"[- ]{re.escape(page)}$", menu, re.M)
