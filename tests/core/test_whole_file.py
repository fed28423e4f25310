import os
import stat

import pytest

from pt2e_quant.core.whole_file import whole_file


def test_written_when_all_went_well_then_whole_and_readable_as_any_other(tmp_path):
    path, other = tmp_path / "a.bin", tmp_path / "b.bin"
    path.write_bytes(b"old")
    with whole_file(path) as stream:
        stream.write(b"new")
        assert path.read_bytes() == b"old"
    other.write_bytes(b"")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(other.stat().st_mode)
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "b.bin"]


def test_failed_when_in_the_middle_then_the_old_file_stays_and_nothing_else(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")

    def interrupted():
        with whole_file(path) as stream:
            stream.write(b"ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.bin"]


def test_folder_when_missing_then_an_os_error(tmp_path):
    with pytest.raises(OSError, match="No such file"), whole_file(tmp_path / "none" / "a.bin"):
        pass
