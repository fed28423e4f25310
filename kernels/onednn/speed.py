"""Measured speed of integer operators against float on a CPU like this one."""

import os
from collections.abc import Mapping
from functools import cache

import torch

from pt2e_quant.kernels.measured import read_measured

SHAPE_CLASS_KEY = "pt2e_quant.shape_class"
"""Key of a fused call's `node.meta`: the class of sizes that its measured ratio is kept by."""

_LEVELS = (
    ("amx", "amx_int8", "AVX512_CORE_AMX"),
    ("avx512_bf16", "avx512_bf16", "AVX512_CORE_BF16"),
    ("avx512_vnni", "avx512_vnni", "AVX512_CORE_VNNI"),
    ("avx512", "avx512_f", "AVX512_CORE"),
    ("avx2_vnni", "avx_vnni", "AVX2_VNNI"),
    ("avx2", "avx2", "AVX2"),
)
"""Slug, torch's name of the CPU's feature, oneDNN's name of a cap at that level; best first."""


@cache
def cpu_slug() -> str:
    """The files' name of the best instructions that oneDNN uses here: "cpu_amx", "cpu_avx2", ….

    What the CPU has, capped by ONEDNN_MAX_CPU_ISA as it was when this was first asked.
    """
    cap = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()
    caps = [name for _, _, name in _LEVELS]
    # Caps above the list's best, AVX512_CORE_FP16 and AMX_FP16 among them, are rounded.
    known = {"AVX512_CORE_FP16": "AVX512_CORE_BF16"}.get(cap, cap)
    first = caps.index(known) if known in caps else 0
    has = torch.cpu.get_capabilities()
    return next((f"cpu_{slug}" for slug, name, _ in _LEVELS[first:] if has.get(name)), "cpu_other")


def measured_here(op: str) -> Mapping[str, float]:
    """Shape class to speed over float on a CPU like this; empty if none was measured."""
    return read_measured(op, cpu_slug())
