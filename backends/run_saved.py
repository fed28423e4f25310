"""Run a saved artifact in this process: what `python -m pt2e_quant.backends.run_saved` does.

The folder that is its argument holds a job and calls, and takes the results, see `new_process`.
"""

import sys
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.new_process import FAILED, Job, JobFiles
from pt2e_quant.backends.registry import get
from pt2e_quant.backends.run_calls import run_artifact
from pt2e_quant.core.errors import Pt2eQuantError


def main(folder: Path) -> int:
    """Load the artifact, run its calls in order, reset it, and run the first again.

    Returns:
        The exit status: 0, or FAILED where something raised an error, which is written down.
    """
    files = JobFiles(folder)
    job = files.read_job()
    try:
        _run(files, job)
    except Exception as error:  # Whatever a runtime raises: it is told to who started this.
        fix = error.fix if isinstance(error, Pt2eQuantError) else None
        what = error.what if isinstance(error, Pt2eQuantError) else ""
        files.write_error(what or f"{type(error).__name__}: {error}", fix)
        return FAILED
    return 0


def _run(files: JobFiles, job: Job) -> None:
    torch.set_num_threads(job.threads)
    for module in job.modules:
        import_module(module)
    files.tell("loading it")
    artifact = get(job.backend).load(files.folder / job.artifact)
    calls = files.read_calls()
    _follow(artifact, [leaf for leaves in calls for leaf in leaves])
    for at, (leaves, label) in enumerate(zip(calls, job.labels, strict=True)):
        if at == job.reset_before:
            files.tell("resetting it")
            artifact.reset()
        files.tell(label)
        files.write_results(at, run_artifact(artifact, leaves))
    files.tell("closing it")


def _follow(artifact: Artifact, leaves: list[object]) -> None:
    """Move an artifact that can be moved to the device of its inputs."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)} - {torch.device("cpu")}
    move = getattr(artifact, "to", None)
    for device in devices:
        if move is not None:
            move(device)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
