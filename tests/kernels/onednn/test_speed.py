"""Which file of measured ratios is read on a CPU."""

import sys

import pytest
import torch

from pt2e_quant.kernels.onednn import speed


@pytest.mark.parametrize(
    ("cap", "slug"), [("AVX2", "cpu_avx2"), ("AVX512_CORE", "cpu_avx512"), ("DEFAULT", "cpu_amx")]
)
def test_slug_when_onednn_is_capped_then_what_it_runs(monkeypatch, cap, slug):
    flags = ("amx_int8", "avx512_bf16", "avx512_vnni", "avx512_f", "avx_vnni", "avx2")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(flags, True))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", cap)
    assert speed.cpu_slug.__wrapped__() == slug


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package with files of two CPUs."""
    folder = tmp_path / "a_package_with_measurements"
    (folder / "measured").mkdir(parents=True)
    (folder / "__init__.py").touch()
    for cpu in ("cpu_avx512_bf16", "cpu_avx2_vnni"):
        (folder / "measured" / f"{cpu}.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, folder.name, raising=False)  # another test's folder
    monkeypatch.delenv(speed.MEASURED_CPU_VARIABLE, raising=False)
    return folder.name


@pytest.mark.parametrize(
    ("here", "found"),
    [
        ("cpu_avx512_bf16", "cpu_avx512_bf16"),
        ("cpu_amx", "cpu_avx512_bf16"),
        ("cpu_avx512", "cpu_avx2_vnni"),
        ("cpu_avx2", "cpu_avx2_vnni"),
        ("cpu_other", "cpu_other"),
    ],
)
def test_measured_cpu_when_this_one_has_no_file_then_the_most_like_it(
    monkeypatch, package, here, found
):
    monkeypatch.setattr(speed, "cpu_slug", lambda: here)
    assert speed.measured_cpu.__wrapped__(package, "measured/{cpu}.json") == found


@pytest.mark.parametrize(
    ("here", "found"),
    [("cpu_avx512_vnni", "cpu_amx"), ("cpu_avx512_bf16", "cpu_amx"), ("cpu_avx512", "cpu_avx2")],
)
def test_measured_cpu_when_one_has_vnni_as_this_then_that_comes_first(
    monkeypatch, package, tmp_path, here, found
):
    folder = tmp_path / package / "measured"
    for file in folder.iterdir():
        file.unlink()
    for cpu in ("cpu_amx", "cpu_avx2"):
        (folder / f"{cpu}.json").write_text("{}")
    monkeypatch.setattr(speed, "cpu_slug", lambda: here)
    assert speed.measured_cpu.__wrapped__(package, "measured/{cpu}.json") == found


def test_measured_cpu_when_there_is_no_file_then_this_one(monkeypatch, package):
    monkeypatch.setattr(speed, "cpu_slug", lambda: "cpu_amx")
    assert speed.measured_cpu.__wrapped__(package, "missing/{cpu}.json") == "cpu_amx"


def test_measured_cpu_when_the_variable_names_one_then_that(monkeypatch, package):
    monkeypatch.setenv(speed.MEASURED_CPU_VARIABLE, "cpu_avx2_vnni")
    assert speed.measured_cpu.__wrapped__(package, "measured/{cpu}.json") == "cpu_avx2_vnni"
