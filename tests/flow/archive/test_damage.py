"""Files that were cut, changed, made by hand or by another: an error each, never wrong data."""

import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.fx import GraphModule

from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.flow.archive.layout import VERSION, is_archive
from pt2e_quant.flow.archive.program import load, save
from pt2e_quant.graph.show import show


def test_load_when_cut_at_any_length_then_an_error(small_file, tmp_path):
    whole = small_file.read_bytes()
    cut = tmp_path / "cut.ptq"
    for length in range(len(whole)):
        cut.write_bytes(whole[:length])
        for mmap in (False, True):
            with pytest.raises(ArtifactError, match="is damaged"):
                load(cut, mmap=mmap)


def test_load_when_longer_than_written_then_an_error(small_file, tmp_path):
    longer = tmp_path / "longer.ptq"
    longer.write_bytes(small_file.read_bytes() + b"\0")
    with pytest.raises(ArtifactError, match="expected"):
        load(longer)


@settings(max_examples=400)
@given(data=st.data())
def test_load_when_bytes_are_flipped_then_an_error_or_the_same(small, small_file, data):
    whole = bytearray(small_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place] ^= 1 << data.draw(st.integers(0, 7))
    changed = small_file.with_name(f"changed{os.getpid()}.ptq")
    changed.write_bytes(whole)
    try:
        loaded = load(changed, mmap=data.draw(st.booleans()))
    except ArtifactError:
        return
    # Only the header's padding, and a bit that was flipped back, can be left.
    assert_same(loaded, small)


def assert_same(loaded: GraphModule, small: GraphModule) -> None:
    assert show(loaded) == show(small)
    for name, value in small.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


@settings(max_examples=200)
@given(noise=st.binary(max_size=400), keeps_length=st.booleans())
def test_load_when_any_bytes_then_an_error(small_file, noise, keeps_length):
    start = small_file.read_bytes()[:8] if keeps_length else b""
    path = small_file.with_name(f"noise{os.getpid()}.ptq")
    path.write_bytes(start + noise)
    with pytest.raises(ArtifactError):
        load(path)


@settings(max_examples=150)
@given(data=st.data())
def test_load_when_the_program_is_any_json_then_an_error_or_a_graph(small_file, data, rewrite):
    """With right checksums: only an error of ours may come of what does not fit."""
    path = small_file.with_name(f"json{os.getpid()}.ptq")
    path.write_bytes(small_file.read_bytes())
    value = data.draw(
        st.recursive(
            st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=6),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
            max_leaves=6,
        )
    )

    def change(outer: dict[str, Any]) -> None:
        places = list(_places(outer["program"]))
        owner, key = data.draw(st.sampled_from(places))
        owner[key] = value

    rewrite(path, change)
    try:
        load(path)
    except ArtifactError:
        return


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, (dict, list)):
            yield from _places(inner)


def test_load_when_of_a_newer_version_then_says_so(own, rewrite):
    rewrite(own, lambda outer: None, version=str(VERSION + 1))
    with pytest.raises(ArtifactError, match=f"format version {VERSION + 1}[^$]*pip install -U"):
        load(own)


def test_load_when_written_by_other_versions_then_they_are_named(own, rewrite):
    def change(outer: dict[str, Any]) -> None:
        outer["program"]["writer"]["pt2e_quant"] = "99.1"
        del outer["program"]["tensors"]

    rewrite(own, change)
    with pytest.raises(ArtifactError, match=r"cannot be read by[^$]*pt2e_quant 99\.1"):
        load(own)


def test_load_when_another_safetensors_file_then_says_so(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors", {"format": "pt"})
    with pytest.raises(ArtifactError, match="not one of pt2e_quant"):
        load(tmp_path / "x.safetensors")
    assert not is_archive(tmp_path / "x.safetensors")


def test_load_when_it_is_the_file_of_an_artifact_then_says_what_reads_it(tmp_path):
    path = tmp_path / "model.pte"
    path.write_bytes(b"\x1c\x00\x00\x00ET12" + bytes(100))
    with pytest.raises(ArtifactError, match=r"backends\.get\(.*\)\.load\(path\)"):
        load(path)


def test_load_when_there_is_no_file_or_a_folder_then_says_so(tmp_path):
    for path in (tmp_path / "none.ptq", tmp_path):
        with pytest.raises(ArtifactError, match="there is no file"):
            load(path)


def test_load_when_a_shard_is_missing_or_changed_then_named(small, tmp_path):
    save(small, tmp_path / "x.ptq", shard_bytes=20)
    shards = sorted(p for p in tmp_path.iterdir() if p.name != "x.ptq")
    assert len(shards) >= 2
    with pytest.raises(ArtifactError, match=r"holds no program[^$]*load the first file"):
        load(shards[0])
    whole = shards[0].read_bytes()
    shards[0].write_bytes(shards[1].read_bytes())
    with pytest.raises(ArtifactError, match=re.escape(shards[0].name)):
        load(tmp_path / "x.ptq")
    shards[0].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ArtifactError, match="checksum"):
        load(tmp_path / "x.ptq")
    shards[0].unlink()
    with pytest.raises(ArtifactError, match=r"shard .* is missing"):
        load(tmp_path / "x.ptq")


def test_load_when_not_verified_then_the_program_is_still(small_file, tmp_path):
    whole = bytearray(small_file.read_bytes())
    # The program is the last of the wide-first order, behind it come other bytes only.
    whole[-1] ^= 1
    (tmp_path / "x.ptq").write_bytes(whole)
    with pytest.raises(ArtifactError, match="checksum"):
        load(tmp_path / "x.ptq", verify=False)


def test_load_when_the_program_is_a_zip_bomb_then_refused(own, rewrite):
    import pt2e_quant.flow.archive.read_files as reading

    rewrite(own, lambda outer: outer.update(rest="x" * 100_000))
    limit = reading.MOST_PROGRAM_BYTES
    reading.MOST_PROGRAM_BYTES = 50_000
    try:
        with pytest.raises(ArtifactError, match="cannot be read"):
            load(own)
    finally:
        reading.MOST_PROGRAM_BYTES = limit


def test_save_when_it_fails_half_way_then_the_old_file_stays(small, own, monkeypatch):
    before = own.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArtifactError, match="No space left"):
        save(small, own)
    assert own.read_bytes() == before
    assert [p.name for p in own.parent.iterdir()] == [own.name]


def test_save_when_the_folder_is_missing_then_says_so(small, tmp_path):
    with pytest.raises(ArtifactError, match="cannot read or write"):
        save(small, tmp_path / "no" / "x.ptq")


def test_load_when_mapped_then_writes_stay_in_memory(small_file, own):
    loaded = load(own, mmap=True)
    with torch.no_grad():
        for value in loaded.state_dict().values():
            value.fill_(3)
    assert own.read_bytes() == small_file.read_bytes()


def test_load_when_in_a_process_that_may_not_unpickle_then_works(small_file):
    """Nothing on the way to a program calls pickle: the module is taken away."""
    script = (
        "import torch, torch._dynamo, pt2e_quant as pq, pickle, sys\n"
        "from pt2e_quant.graph.pickling import pickle_module\n"
        "load = pq.load\n"
        "def refuse(*a, **k): raise SystemExit('unpickled')\n"
        "pickle.loads = pickle.load = pickle.Unpickler = torch.load = refuse\n"
        "pickle_module._Unpickler = refuse\n"
        "gm = load(sys.argv[1])\n"
        "print(gm(torch.ones(2, 3))['y'].shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(small_file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "[2, 2]" in done.stdout
