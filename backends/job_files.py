"""The files between a process and the new one that it starts to run an artifact."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pt2e_quant.backends.compare_results import Results

FAILED = 3
"""The exit status of a process in which something raised an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be run.

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
        """Write down what is being done, before it is done."""
        (self.folder / "step.txt").write_text(step)

    def step(self) -> str:
        """What was being done last."""
        path = self.folder / "step.txt"
        return path.read_text() if path.exists() else "starting"

    def write_error(self, what: str, fix: str | None) -> None:
        """Write down an error."""
        (self.folder / "error.json").write_text(json.dumps([what, fix]))

    def read_error(self) -> tuple[str, str | None]:
        """Read what `write_error` wrote."""
        what, fix = json.loads((self.folder / "error.json").read_text())
        return what, fix
