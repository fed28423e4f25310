"""Measured speed of integer operators against float on a CPU like this one."""

import os
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

import torch

from pt2e_quant.kernels.measured import read_measured

SHAPE_CLASS_KEY = "pt2e_quant.shape_class"
"""Key of a fused call's `node.meta`: the class of sizes that its measured ratio is kept by."""

MEASURED_CPU_VARIABLE = "PT2E_QUANT_MEASURED_CPU"

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


@cache
def measured_cpu(package: str, path: str) -> str:
    """The slug of the CPU most like this one that a package has a file of measurements for.

    This CPU's own, or the nearest one with fewer instructions, which run here too, or the nearest
    one with more: what was slower in integers there is hardly faster here. Those with VNNI where
    this one has it, or without where it has not, come first: it is worth the most. CPUs whose
    instructions have no slug are like no other. The variable PT2E_QUANT_MEASURED_CPU names one for
    every machine, so that files do not depend on the machine that makes them.

    Args:
        package: the package with the file.
        path: of the file in the package, with "{cpu}" for the slug.

    Returns:
        The slug; this CPU's if there is no file.
    """
    here, slugs = cpu_slug(), [f"cpu_{slug}" for slug, _, _ in _LEVELS]
    if MEASURED_CPU_VARIABLE in os.environ:
        return os.environ[MEASURED_CPU_VARIABLE]
    if here not in slugs:
        return here
    at = slugs.index(here)
    nearest = (here, *slugs[at + 1 :], *reversed(slugs[:at]))
    likely = sorted(nearest, key=lambda slug: has_vnni(slug) is not has_vnni(here))
    root = files(package)
    return next((s for s in likely if root.joinpath(path.format(cpu=s)).is_file()), here)


def has_vnni(slug: str) -> bool:
    """True if CPUs of a slug add 8-bit products in 32 bits."""
    return slug in ("cpu_amx", "cpu_avx512_bf16", "cpu_avx512_vnni", "cpu_avx2_vnni")


def measured_here(op: str) -> Mapping[str, float]:
    """Shape class to speed over float on a CPU like this; empty if none was measured."""
    return read_measured(op, kernel_cpu(op))


def kernel_cpu(op: str) -> str:
    """The slug of the CPU that `measured_here` has the ratios of."""
    return measured_cpu("pt2e_quant.kernels", f"{op}/measured/{{cpu}}.json")
