"""Pages that are made when the site is built: the API reference, and two files of the root.

MkDocs calls `on_files` (`hooks` in mkdocs.yml). Modules in `REFERENCE` are documented name by name,
as `__all__` lists them or the module defines them: a new name is there without an edit here.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from pt2e_quant.backends import get
from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.registry import OWN
from pt2e_quant.backends.target.backend import Backend

ROOT = Path(__file__).resolve().parents[1]
FROM_ROOT = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Page to file, of files that GitHub shows from the root of the repository."""

REFERENCE = {
    "api/backends.md": (
        "Backends and artifacts",
        "What `pq.backends.get(name)` returns, and what its `lower` and `load` return.",
        (
            "pt2e_quant.backends",
            "pt2e_quant.backends.artifact",
            "pt2e_quant.backends.target.backend",
            "pt2e_quant.backends.target.recipe",
            "pt2e_quant.backends.target.lower",
        ),
    ),
    "api/quantizers.md": (
        "Quantizers and schemes",
        "What a backend's `quantizer(recipe)` returns, and how a scheme is written.",
        (
            "pt2e_quant.flow.annotate.table_quantizer",
            "pt2e_quant.flow.annotate.integer_quantizer",
            "pt2e_quant.core.schemes",
            "pt2e_quant.core.scheme_names",
            "pt2e_quant.core.formats.scale_format",
            "pt2e_quant.core.granularity",
        ),
    ),
    "api/algorithms.md": (
        "Algorithms",
        "`pq.algorithms`: methods that make quantization cost less, and what one is made of.",
        ("pt2e_quant.passes.algorithms",),
    ),
    "api/training.md": (
        "Training in low precision",
        "`pq.training`: products, optimizers and stored weights of few bits.",
        ("pt2e_quant.training",),
    ),
    "api/reports.md": (
        "Reports and records",
        "What an artifact's `report`, `pq.compare`, `pq.sensitivity`, `pq.profile` and "
        "`pq.provenance_of(graph)` hold.",
        (
            "pt2e_quant.flow.report.report",
            "pt2e_quant.backends.profile",
            "pt2e_quant.analysis.comparison",
            "pt2e_quant.analysis.group_costs",
            "pt2e_quant.analysis.tensor_values",
            "pt2e_quant.analysis.tuned",
            "pt2e_quant.backends.target.recipe_file",
            "pt2e_quant.flow.report.page.section",
            "pt2e_quant.core.provenance",
            "pt2e_quant.core.capture",
        ),
    ),
    "api/op_tables.md": (
        "Op tables and patterns",
        "What a backend's table is written with.",
        ("pt2e_quant.graph.op_table", "pt2e_quant.graph.pattern", "pt2e_quant.graph.pipeline"),
    ),
    "api/errors.md": (
        "Error classes",
        "What the package raises and warns of; [Errors](../errors.md) says what to do.",
        ("pt2e_quant.core.errors",),
    ),
    "api/pt2e_quant.md": (
        "pt2e_quant",
        "`import pt2e_quant as pq`: what a program that quantizes a model uses.",
        ("pt2e_quant",),
    ),
    "api/pt2e.md": (
        "pt2e_quant.pt2e",
        "The names of torchao's PT2E under torchao's submodules: change the import of a script.",
        (
            "pt2e_quant.pt2e",
            "pt2e_quant.pt2e.quantize_pt2e",
            "pt2e_quant.pt2e.quantizer",
            "pt2e_quant.pt2e.observer",
            "pt2e_quant.pt2e.fake_quantize",
            "pt2e_quant.pt2e.learnable_fake_quantize",
            "pt2e_quant.pt2e.lowering",
            "pt2e_quant.pt2e.graph_utils",
            "pt2e_quant.pt2e.utils",
        ),
    ),
}
"""Page to its title, its first sentence and the modules that it documents.

An object has its entry on the first page that offers it; further pages link there.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to those that MkDocs found."""
    for page, text in made_pages().items():
        files.append(File.generated(config, page, content=text))
    return files


def made_pages() -> dict[str, str]:
    """Every page that is made, with its text."""
    found = {page: _from_root((ROOT / name).read_text()) for page, name in FROM_ROOT.items()}
    found["decisions/index.md"] = _decisions()
    shown: set[str] = set()
    for page, (title, intro, modules) in REFERENCE.items():
        lines = [f"# {title}", "", intro, ""]
        for path in modules:
            module = importlib.import_module(path)
            objects = {name: object_path(module, name) for name in public_names(module)}
            lines += [f"## `{path}`", "", *_entries(objects, shown)]
            if path == "pt2e_quant.backends":
                lines += _backend_entries(shown)
        found[page] = "\n".join(lines)
    return found


def _from_root(text: str) -> str:
    """A file of the root with its links as they are seen from `docs/`."""
    for page, name in FROM_ROOT.items():
        text = text.replace(f"]({name})", f"]({page})")
    return re.sub(r"\]\(docs/", "](", text)


def _decisions() -> str:
    """The list of the decisions, by their titles."""
    files = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    titles = ((file.name, file.read_text().partition("\n")[0].lstrip("# ")) for file in files)
    lines = [f"- [{title}]({name})" for name, title in titles]
    intro = "Choices that a later reader would ask about: the question, the choice, what it costs."
    figures = "Figures without a file of `benchmarks/results/` are of single runs on one machine."
    return "\n".join(["# Decisions", "", intro, figures, "", *lines, ""])


def _entries(objects: Mapping[str, str], shown: set[str]) -> Iterator[str]:
    """An entry for each object without one, and links to the entries of the others.

    Args:
        objects: public name to the path of the object.
        shown: paths that have an entry; new ones are added.
    """
    links = []
    for name, path in objects.items():
        if path in shown:
            links.append(f"[`{name}`][{path}]")
            continue
        shown.add(path)
        yield from (f"::: {path}", "    options:", "      heading_level: 3", "")
    if links:
        yield from ("Documented with other names or on other pages: " + ", ".join(links) + ".", "")


def public_names(module: ModuleType) -> list[str]:
    """What a module offers: what it lists, else what it defines; without modules inside it."""
    offered = getattr(module, "__all__", None) or _defined_in(inspect.getsource(module))
    return [name for name in offered if not inspect.ismodule(getattr(module, name))]


def _defined_in(source: str) -> list[str]:
    """The names that a module's source defines at its top, without those of an underscore."""
    names: list[str] = []
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.append(name)
    return sorted(name for name in names if not name.startswith("_"))


def object_path(module: ModuleType, name: str) -> str:
    """Where an object is defined; a value that does not say it is found where it is offered."""
    thing = getattr(module, name)
    if inspect.isclass(thing) or inspect.isfunction(thing):
        return f"{thing.__module__}.{thing.__qualname__}"
    return f"{module.__name__}.{name}"


def _backend_entries(shown: set[str]) -> Iterator[str]:
    """The class of each backend, of what it lowers with, and of its artifacts."""
    for name, module in sorted(OWN.items()):
        backend = type(get(name))
        package = module.rpartition(".")[0]
        options = importlib.import_module(f"{package}.lower").Options
        yield from (f"## {get(name).table.backend}", "")
        classes = (*((backend,) if backend is not Backend else ()), options, *_artifacts(package))
        yield from _entries(
            {cls.__name__: f"{cls.__module__}.{cls.__qualname__}" for cls in classes}, shown
        )


def _artifacts(package: str) -> list[type[Artifact]]:
    """The artifact classes that a backend's package defines."""
    found, todo = [], [Artifact]
    while todo:
        todo += (below := todo.pop().__subclasses__())
        found += [cls for cls in below if cls.__module__.startswith(package + ".")]
    return found
