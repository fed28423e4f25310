"""Which file of measured ratios is read on a CPU."""

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
