"""Run a saved artifact in a new process that only loads it: a crash there is an error here."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.compare_results import Results
from pt2e_quant.backends.registry import get
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ArtifactError

LIMIT_S = 300.0
"""Seconds that a new process may take beside the calls: to import torch and a runtime on a machine
that is busy, and to load the file."""

_SLOWER = 50
"""So many times what the graph itself takes the calls may take."""

_FIX = "leave the operators at fault float; verify=False to look at it"


def run_in_new_process(
    artifact: Artifact,
    backend: str,
    calls: Sequence[tuple[str, Sequence[Any]]],
    *,
    reset_before: int,
    graph_s: float,
) -> list[Results]:
    """Save an artifact, load it in a new process, and run calls there in order.

    Args:
        artifact: to save.
        backend: the name of the backend that loads it.
        calls: a label and the leaves of each.
        reset_before: the number of the call that the artifact is reset before.
        graph_s: what the canonical graph takes for the calls, in seconds: the time limit grows
            with it.

    Returns:
        What each call gave.

    Raises:
        ArtifactError: the process died, took too long, or something raised an error there; it says
            what was being run.
    """
    with tempfile.TemporaryDirectory(prefix="pt2e_quant_") as folder:
        files = JobFiles(Path(folder))
        name = f"artifact{get(backend).suffix}"
        artifact.save(files.folder / name)
        job = Job(
            backend=backend,
            artifact=name,
            labels=tuple(label for label, _ in calls),
            reset_before=reset_before,
            modules=tuple(_modules(artifact.capture)),
            threads=torch.get_num_threads(),
        )
        files.write_job(job, [leaves for _, leaves in calls])
        limit_s = LIMIT_S + _SLOWER * graph_s
        status, printed = _start(files.folder, limit_s)
        if status is None:
            raise ArtifactError(
                f"a new process that runs the artifact had not finished after {limit_s:.0f} s: "
                f"{files.step()}{printed}",
                fix=_FIX,
            )
        if status == FAILED:
            what, fix = files.read_error()
            raise ArtifactError(
                f"the artifact fails in a new process, {files.step()}: {what}", fix=fix or _FIX
            )
        if status:
            raise ArtifactError(
                f"a new process that runs the artifact {_death(status)}, {files.step()}{printed}",
                fix=_FIX,
            )
        return [files.read_results(at) for at in range(len(calls))]


def _start(folder: Path, limit_s: float) -> tuple[int | None, str]:
    """The exit status of the process, None if it was stopped at the limit, and what it printed."""
    command = [sys.executable, "-X", "faulthandler", "-m", "pt2e_quant.backends.run_saved"]
    paths = [os.path.abspath(path) for path in sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    output = folder / "printed.txt"
    with output.open("wb") as stream:
        try:
            done = subprocess.run(
                [*command, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=limit_s,
                check=False,
            )
            status: int | None = done.returncode
        except subprocess.TimeoutExpired:
            status = None
    return status, _last_words(output.read_text(errors="replace").strip().splitlines())


def _last_words(lines: Sequence[str]) -> str:
    """The lines that a process printed around Python's fatal error."""
    fatal = [at for at, line in enumerate(lines) if line.startswith("Fatal Python error")]
    first = fatal[0] - 3 if fatal else len(lines) - 10
    return "".join(f"\n    {line}" for line in lines[max(0, first) :][:10])


def _death(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        return f"died of {signal.Signals(-status).name}"
    except ValueError:
        return f"died of signal {-status}"


def _modules(capture: Capture) -> Iterator[str]:
    """The modules of classes in a call and its result, which loading the call needs."""
    todo: list[pytree.TreeSpec] = [capture.in_spec, capture.out_spec]
    seen = {"__main__", "builtins", "collections"}
    while todo:
        spec = todo.pop()
        todo += [spec.child(i) for i in range(spec.num_children)]
        module = getattr(spec.type, "__module__", "builtins")
        if module not in seen and module.partition(".")[0] != "torch":
            seen.add(module)
            yield module


FAILED = 3
"""The exit status of a process in which something raised an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The calls to run in a new process.

    Args:
        backend: the name of the backend that loads the artifact.
        artifact: the name of its file.
        labels: of each call, for errors.
        reset_before: the number of the call that the artifact is reset before.
        modules: to import first, for the classes in the call and its result.
        threads: of torch.
    """

    backend: str
    artifact: str
    labels: tuple[str, ...]
    reset_before: int
    modules: tuple[str, ...]
    threads: int


class JobFiles:
    """A folder of them.

    Args:
        folder: that both processes can write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write_job(self, job: Job, calls: Sequence[Sequence[Any]]) -> None:
        """Write what is to be run, and each call's leaves."""
        (self.folder / "job.json").write_text(json.dumps(asdict(job)))
        torch.save([list(leaves) for leaves in calls], self.folder / "calls.pt")

    def read_job(self) -> Job:
        """Read what is to be run."""
        data = json.loads((self.folder / "job.json").read_text())
        lists = {key: tuple(data[key]) for key in ("labels", "modules")}
        return Job(**{**data, **lists})

    def read_calls(self) -> list[list[Any]]:
        """Read the leaves of each call."""
        found: list[list[Any]] = torch.load(self.folder / "calls.pt", weights_only=True)
        return found

    def write_results(self, at: int, results: Results) -> None:
        """Write what one call gave."""
        torch.save(dict(results), self.folder / f"results_{at}.pt")

    def read_results(self, at: int) -> Results:
        """Read what one call gave."""
        found: Results = torch.load(self.folder / f"results_{at}.pt", weights_only=True)
        return found

    def tell(self, step: str) -> None:
        """Write the name of the step that starts now."""
        (self.folder / "step.txt").write_text(step)

    def step(self) -> str:
        """The name of the last step that was started."""
        path = self.folder / "step.txt"
        return path.read_text() if path.exists() else "starting"

    def write_error(self, what: str, fix: str | None) -> None:
        """Write down an error."""
        (self.folder / "error.json").write_text(json.dumps([what, fix]))

    def read_error(self) -> tuple[str, str | None]:
        """Read what `write_error` wrote."""
        what, fix = json.loads((self.folder / "error.json").read_text())
        return what, fix
