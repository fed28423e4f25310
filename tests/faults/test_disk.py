"""Disks that are full and folders that cannot be written: an error, and nothing half-written."""

import errno
import os
import resource
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import pt2e_quant as pq
from pt2e_quant.core.errors import ArtifactError, Pt2eQuantError
from tests.faults.conftest import call, calls, equal, exported, target_of

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="limits and /sys are Linux's")


@contextmanager
def files_of_at_most(size: int):
    """The system refuses to write a file's later bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@ON_LINUX
@pytest.mark.parametrize("is_there", [False, True])
def test_save_when_the_disk_is_full_then_an_error_and_what_was_there(
    artifact, backend, is_there, tmp_path
):
    path = tmp_path / f"model{target_of(backend).suffix}"
    if is_there:
        artifact.save(path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with files_of_at_most(1024), pytest.raises(ArtifactError, match="cannot write"):
        artifact.save(path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    artifact.save(path)
    assert equal(target_of(backend).load(path).run(*call()), artifact.run(*call()))


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_save_when_the_last_step_finds_no_space_then_an_error_and_no_file(
    artifact, backend, step, tmp_path, monkeypatch
):
    def refuse(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*((os, "fsync") if step == "fsync" else (Path, "replace")), refuse)
    with pytest.raises(ArtifactError, match="No space left"):
        artifact.save(tmp_path / f"model{target_of(backend).suffix}")
    assert list(tmp_path.iterdir()) == []


@ON_LINUX
def test_save_when_the_folder_is_read_only_then_an_error(artifact, backend):
    # Not even the superuser makes a file there.
    with pytest.raises(ArtifactError, match="cannot write"):
        artifact.save(Path("/sys/kernel") / f"model{target_of(backend).suffix}")
    assert artifact.run(*call())


@ON_LINUX
@pytest.mark.parametrize("converted", [False, True])
def test_program_when_the_disk_is_full_then_an_error_and_what_was_there(
    plain_backend, converted, tmp_path
):
    gm = pq.calibrate(
        pq.prepare_pt2e(exported(), plain_backend.quantizer()), calls(2), progress=False
    )
    gm = pq.convert_pt2e(gm) if converted else gm
    path = tmp_path / "program.ptq"
    pq.save(gm, path)
    before = path.read_bytes()
    with files_of_at_most(1024), pytest.raises(Pt2eQuantError, match=r"cannot .*write"):
        pq.save(gm, path)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before
    with pytest.raises(Pt2eQuantError, match=r"cannot .*write"):
        pq.save(gm, "/sys/kernel/program.ptq")
