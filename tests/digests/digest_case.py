"""Quantize and lower the models of the corpus, and take their digests."""

import contextlib
import copy
import io
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

import pt2e_quant as pq
from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.graph.show import show
from pt2e_quant.kernels.product_trial.verdicts import TRIALS_VARIABLE
from tests.digests.choose_pairs import pairs_of
from tests.digests.corpus import CASES, Case, guide_blocks
from tests.digests.digest_artifact import digest_program, digest_results
from tests.digests.digest_graph import digest_graph

__all__ = ["Digest", "digest_corpus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """What must not change of one model on one backend with one recipe.

    Args:
        form: of the converted graph without constants' values.
        graph: of the converted graph.
        program: of what the artifact runs.
        results: of the artifact's results.
        refused: the stage that an error ended, and the error's class; "" for none.
    """

    form: str = ""
    graph: str = ""
    program: str = ""
    results: str = ""
    refused: str = ""

    def parts(self) -> dict[str, str]:
        """What is not empty."""
        return {name: text for name, text in asdict(self).items() if text}


def digest_corpus(wanted: str, texts: Path | None = None) -> Iterator[tuple[str, Digest]]:
    """Digests by "model / backend / recipe", in a fixed order, of the keys that hold a text.

    Args:
        wanted: a part of the keys; "" for all.
        texts: a folder for the converted graphs as text.
    """
    torch.set_num_threads(1)
    os.environ[TRIALS_VARIABLE] = "0"  # Times of this machine must not decide.
    for name, make in CASES.items():
        if wanted and wanted.split(" / ")[0] not in name:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            case = make()
            for backend, recipe in sorted(pairs_of(name, case.has_linear, case.own)):
                key = f"{name} / {backend} / {recipe}"
                if wanted in key:
                    yield key, _digest(case, backend, recipe, texts and texts / _file_name(key))
    if wanted in "guide" or wanted.startswith("guide"):
        yield from _digest_guide()


def _file_name(key: str) -> str:
    return f"{key.replace(' / ', '-').replace(' ', '_')}.txt"


def _digest(case: Case, backend: str, recipe: str, text: Path | None) -> Digest:
    target: Any = pq.backends.get(backend)
    options = {"allow_unmeasured": True} if backend == "cuda" else {}
    if backend in ("cpu", "onnx"):
        target = target.allowing_slower()  # what was measured depends on the machine
    if backend == "cpu":
        target = target.without_trials()
    stage, found = "prepare", Digest()
    try:
        quantizer = target.quantizer(recipe)
        quantizer.pad_groups()
        prepared = pq.prepare_pt2e(copy.deepcopy(case.program), quantizer, strict=False)
        stage = "calibrate"
        pq.calibrate(prepared, [_batch(*call) for call in case.data], progress=False)
        stage = "convert"
        gm = pq.convert_pt2e(prepared)
        if text is not None:
            text.write_text(show(gm))
        found = _digest_converted(gm)
        stage = "lower"
        artifact = target.lower(gm, strict=False, verify=False, **options)
        stage = "run"
        return _digest_lowered(found, artifact, case)
    except Exception as error:  # Also a fault is recorded: whatever changes is seen.
        refused = f"{stage}: {type(error).__name__}"
        return Digest(form=found.form, graph=found.graph, refused=refused)


def _batch(args: Any, kwargs: Any) -> Any:
    return dict(kwargs) if kwargs and not args else tuple(args)


def _digest_converted(gm: GraphModule) -> Digest:
    return Digest(form=digest_graph(gm, values=False), graph=digest_graph(gm))


def _digest_lowered(found: Digest, artifact: Artifact, case: Case) -> Digest:
    program = digest_program(artifact)
    with torch.no_grad():
        results = [artifact.run(*copy.deepcopy(a), **copy.deepcopy(k)) for a, k in case.calls]
        texts = digest_results(results)
    return Digest(form=found.form, graph=found.graph, program=program, results=texts)


def _digest_guide() -> Iterator[tuple[str, Digest]]:
    """Run the guide's blocks, and digest the converted graphs and artifacts that they leave."""
    names: dict[str, Any] = {"__name__": "guide"}
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        try:
            torch.manual_seed(0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for block in guide_blocks():
                    exec(compile(block, "guide.md", "exec"), names)
        finally:
            os.chdir(here)
    for name, value in names.items():
        if isinstance(value, Artifact):
            yield f"guide / {name}", Digest(program=digest_program(value))
        elif isinstance(value, GraphModule) and not hasattr(value, "observers"):
            yield f"guide / {name}", Digest(graph=digest_graph(value))
