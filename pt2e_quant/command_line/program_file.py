"""Programs of torch.export in .pt2 files."""

import logging
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.export import ExportedProgram

from pt2e_quant.core.errors import ArtifactError

_UNREGISTERED = re.compile(r"Deserializing (\S+) in pytree is not registered")
_SAVE = "torch.export.save(torch.export.export(model.eval(), inputs), path)"


def load_program(path: Path) -> ExportedProgram:
    """Read what torch.export.save wrote.

    Raises:
        ArtifactError: the file is missing, damaged or something else.
    """
    if not path.is_file():
        raise ArtifactError(f"there is no file {path}", fix=f"write it: {_SAVE}")
    _check_archive(path)
    reasons: list[BaseException] = []
    try:
        with _collect_log(reasons):
            return torch.export.load(path)
    except Exception as error:  # torch raises anything on what it cannot read
        reason = reasons[0] if reasons else error
        if found := _UNREGISTERED.search(str(reason)):
            raise ArtifactError(
                f"{path} returns or takes a {found[1]}, which is not imported",
                fix=f"import the module that registers it: --import {found[1].rpartition('.')[0]}",
            ) from error
        lines = str(reason).strip().splitlines() or [""]
        raise ArtifactError(
            f"{path} is no program of torch.export that torch {torch.__version__} can read: "
            f"{type(reason).__name__}: {lines[0]}",
            fix=f"write it with this version of torch: {_SAVE}",
        ) from error


def _check_archive(path: Path) -> None:
    """Compare every entry with its checksum: torch reads damaged weights without a word."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError) as error:
        raise ArtifactError(
            f"{path} is damaged or no .pt2 file: {error}", fix=f"write it again: {_SAVE}"
        ) from error
    if damaged is not None:
        raise ArtifactError(
            f"{path} is damaged: the checksum of {damaged} differs", fix=f"write it again: {_SAVE}"
        )
    if any(name.endswith("/data.pkl") for name in names) and not any(
        "models/" in name for name in names
    ):
        raise ArtifactError(
            f"{path} was written by torch.save: it holds no exported program",
            fix=f"export the model and save that: {_SAVE}",
        )


@contextmanager
def _collect_log(reasons: list[BaseException]) -> Iterator[None]:
    """Take what torch logs of each attempt: its own error says only that there was one."""
    logger = logging.getLogger("torch.export")

    def take(record: logging.LogRecord) -> bool:
        if record.exc_info and record.exc_info[1] is not None:
            reasons.append(record.exc_info[1])
        return False

    logger.addFilter(take)
    try:
        with warnings.catch_warnings():
            # torch 2.13 warns about its own pytree code
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            yield
    finally:
        logger.removeFilter(take)
