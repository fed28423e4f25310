"""A backend small enough for tests: it runs the canonical graph in torch."""

import json
import os
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch.utils import _pytree as pytree

from pt2e_quant.backends import registry
from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.cpu import lower, policy
from pt2e_quant.backends.target import islands
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.backends.target.lower import Draft, Job, Lowering, Options
from pt2e_quant.backends.target.recipe import Recipe, Recipes
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.provenance import Provenance, provenance_of
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.core.schemes import INT8_ACTIVATION, INT8_WEIGHT, Role, Scheme
from pt2e_quant.flow.reexport import export_again
from pt2e_quant.flow.report.report import Report
from pt2e_quant.graph.op_table import OUT, OpRow, OpTable, Slot
from pt2e_quant.graph.pattern import Op, Var
from pt2e_quant.kernels.product_trial import verdicts
from pt2e_quant.kernels.product_trial.run_here import run_here

# The same examples in every run, so that a change fails by its own fault. Others are looked for
# with HYPOTHESIS_PROFILE=search, also in the processes that tests start. No test has a time limit.
settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("search", derandomize=False, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))

_aten = torch.ops.aten
_INT8 = Scheme(name="int8", input=INT8_ACTIVATION, output=INT8_ACTIVATION, weight=INT8_WEIGHT)
_SLOTS = (
    Slot(at="x", role=Role.INPUT, accepts=(INT8_ACTIVATION,)),
    Slot(at="w", role=Role.WEIGHT, accepts=(INT8_WEIGHT,)),
    Slot(at=OUT, role=Role.OUTPUT, accepts=(INT8_ACTIVATION,)),
)
TABLE = OpTable(
    backend="Plain",
    rows=tuple(
        OpRow(
            name=name, find=(Op(op, Var("x"), Var("w"), name=name),), slots=_SLOTS, lowers_to=name
        )
        for name, op in (("linear", _aten.linear.default), ("conv2d", _aten.conv2d.default))
    ),
)


def pytest_configure(config: pytest.Config) -> None:
    """Give workers that share a machine one thread each, and all of them one cache of verdicts."""
    # Torch says some things once a process: which test fails by them would depend on the order.
    torch.set_warn_always(True)
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
    elif verdicts.CACHE_VARIABLE not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="pt2e_quant_tests_")
        config.add_cleanup(folder.cleanup)
        os.environ[verdicts.CACHE_VARIABLE] = folder.name
    # Processes that tests start neither try nor time products: only tests of those do.
    os.environ.setdefault(verdicts.TRIALS_VARIABLE, "0")


@pytest.fixture(autouse=True)
def tried_here(monkeypatch):
    """Products are tried in this process: a child for each new shape would take seconds."""
    monkeypatch.setattr(verdicts, "run_in_child", run_here)
    monkeypatch.setattr(lower, "are_tried", lambda: True)


@pytest.fixture
def unmeasured(monkeypatch):
    """The CPU backend quantizes tiny shapes too, whatever was measured on such a machine."""
    monkeypatch.setattr(policy, "measured_here", lambda op: {})


@pytest.fixture(scope="module")
def integers_everywhere():
    """No operator is put in float because a graph is faster so: small ones all would be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(islands, "times_here", lambda backend: {})
        yield


class PlainArtifact(Artifact):
    def __init__(self, program, capture: Capture, report: Report) -> None:
        super().__init__(capture, report)
        self.program = program
        self.gm = program.module()

    def run_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        with torch.no_grad():
            args, kwargs = pytree.tree_unflatten(list(leaves), self.capture.in_spec)
            return pytree.tree_leaves(self.gm(*args, **kwargs))

    def reset(self) -> None:
        self.gm = self.program.module()

    def state(self) -> Mapping[str, Any]:
        return {name: self.gm.get_buffer(name) for name in self.capture.mutated_buffers}

    def save(self, path: str | Path) -> None:
        texts = {
            "capture": self.capture.to_json(),
            "provenance": self.report.provenance.to_json(),
        }
        temporary = Path(f"{path}.tmp.pt2")
        torch.export.save(self.program, temporary, extra_files={"plain": json.dumps(texts)})
        temporary.rename(path)

    @property
    def size_bytes(self) -> int:
        return 1234


def _emit(job: Job[Options]) -> Draft:
    report = Report(backend="Plain", provenance=provenance_of(job.gm), size_bytes=1234)
    artifact = PlainArtifact(export_again(job.gm), capture_of(job.gm), report)
    return Draft(artifact=artifact)


def _load(path: str | Path) -> PlainArtifact:
    extra = {"plain": ""}
    try:
        with Path(path).open("rb") as stream:
            program = torch.export.load(stream, extra_files=extra)
        texts = json.loads(extra["plain"])
    except Exception as error:
        raise ArtifactError(f"{path} is damaged") from error
    report = Report(
        backend="Plain", provenance=Provenance.from_json(texts["provenance"]), size_bytes=1234
    )
    return PlainArtifact(program, Capture.from_json(texts["capture"]), report)


class _PlainLowering(Lowering[Options]):
    """Checks in this process alone: a new one does not know the backend."""

    def lower(self, gm, example_inputs, options):
        here = replace(options, verify=bool(options.verify))
        return super().lower(gm, example_inputs, here)


PLAIN = Backend(
    name="plain",
    suffix=".plain",
    table=TABLE,
    recipes=Recipes("Plain", (Recipe(name="int8", text="static int8", scheme=_INT8),)),
    lowering=lambda: _PlainLowering(
        name="plain", options=Options, prepare=lambda gm, _: gm, emit=_emit, load=_load
    ),
)


@pytest.fixture
def plain_backend(monkeypatch) -> Backend:
    """Registered as "plain"; needs no extra."""
    module = types.ModuleType("plain_backend")
    module.BACKEND = PLAIN
    monkeypatch.setitem(sys.modules, "plain_backend", module)
    monkeypatch.setitem(registry.OWN, "plain", "plain_backend")
    return PLAIN
