"""What a compiled kernel's instructions say of its speed, as numbers that can be compared."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from benchmarks.kernels.ahead_of_time.compiled import Compiled
from benchmarks.kernels.ahead_of_time.disassemble import Disassembly, Instruction, main_loop
from benchmarks.kernels.ahead_of_time.generations import Generation
from benchmarks.kernels.compile_case import CompileCase
from pt2e_quant.kernels.tiles import TileConfig

__all__ = ["KernelFacts", "kernel_facts"]

_SYNCHRONOUS = {"16832": (16, 8, 32), "16816": (16, 8, 16), "1688": (16, 8, 8)}
"""mma.sync: rows, columns and depth of one warp's instruction."""


_HALF_ARITHMETIC = re.compile(
    r"\b(?:arith\.(?:add|sub|mul|div|rem|neg|maximum|minimum|maxnum|minnum|cmp)f|math\.\w+|tt\.clampf)"
    r"\b[^\n]*: (?:tensor<[^>\n]*x)?b?f16>?"
)


_JUDGED_ALONE = ("half_arithmetic", "narrowest_load")
"""Facts that rules judge, and no baseline has a use for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """Static facts of one kernel, tile row and generation.

    Args:
        registers: of one thread.
        spills: instructions that write or read registers that did not fit.
        shared_bytes: of one block.
        blocks_per_sm: resident at once.
        matrix: the loop's matrix instruction, "IGMMA.64x128x32"; empty if it has none.
        loop_instructions: of one thread, in one turn of the main loop.
        wide_loads: share of the bytes of the loop's global loads that are loaded 16 at a time;
            1.0 if it has none. Qparams of groups do not count.
        issue_share: time to issue the loop's instructions over that of its matrix products, at the
            published rates: below 1 the matrix units are the limit. None where either is unknown.
        narrowest_load: bytes of the smallest global load of the loop; 16 if it has none.
        half_arithmetic: operations on bfloat16 or float16 values other than casts, loads, stores
            and products of matrices: the interpreter computes them wrongly, so no test sees them.
        per_weight: instructions of a thread for each packed weight; None where there are none.
    """

    registers: int
    spills: int
    shared_bytes: int
    blocks_per_sm: int
    matrix: str
    loop_instructions: int
    wide_loads: float
    narrowest_load: int = 16
    half_arithmetic: int = 0
    issue_share: float | None = None
    per_weight: float | None = None

    def to_json(self) -> dict[str, object]:
        """Without the facts that are unknown, and those that a baseline has no use for."""
        kept = {n: v for n, v in asdict(self).items() if n not in _JUDGED_ALONE}
        return {n: v for n, v in kept.items() if v is not None}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "KernelFacts":
        """What `to_json` wrote."""
        return cls(**row)


def kernel_facts(
    case: CompileCase,
    tiles: TileConfig,
    compiled: Compiled,
    listing: Disassembly,
    generation: Generation,
) -> KernelFacts:
    """The facts of a compiled kernel."""
    loop = main_loop(listing.instructions)
    loads = [i for i in loop if i.is_global_load]
    kinds = Counter(i.opcode for i in loop if i.is_matrix)
    shared = max(compiled.shared_bytes, listing.shared_bytes)
    sizes = {**case.constants, **dict(tiles.blocks)}
    packed = [int(sizes[name]) for name in case.packed_weights]
    weights = prod(packed) if packed else 0
    threads = 32 * compiled.warps
    return KernelFacts(
        registers=listing.registers,
        spills=sum(i.name in ("LDL", "STL") for i in listing.instructions),
        shared_bytes=shared,
        blocks_per_sm=generation.resident_blocks(
            warps=compiled.warps, registers=listing.registers, shared=shared
        ),
        matrix=max(kinds, key=lambda kind: kinds[kind]) if kinds else "",
        loop_instructions=len(loop),
        # Beside packed weights the loads of one and two bytes are scales and zero points of groups.
        wide_loads=_wide_share([i for i in loads if not packed or i.loaded_bytes > 2]),
        narrowest_load=min((i.loaded_bytes for i in loads), default=16),
        half_arithmetic=len(_HALF_ARITHMETIC.findall(compiled.ttir)),
        issue_share=_issue_share(loop, generation),
        per_weight=round(len(loop) * threads / weights, 2) if weights else None,
    )


def _wide_share(loads: Sequence[Instruction]) -> float:
    """By bytes: what is narrow weighs little beside what is wide."""
    total = sum(i.loaded_bytes for i in loads)
    return round(sum(i.loaded_bytes for i in loads if i.is_wide) / total, 3) if total else 1.0


def _issue_share(loop: Sequence[Instruction], generation: Generation) -> float | None:
    """Of one warp: both times grow alike with the number of warps."""
    products = 0.0
    for instruction in loop:
        if not instruction.is_matrix:
            continue
        rate = generation.multiply_adds.get(instruction.name)
        size = _multiply_adds_of_a_warp(instruction.opcode)
        if rate is None or size is None:
            return None
        products += size / rate
    # Four schedulers issue one instruction of a warp a clock each.
    return round(len(loop) / 4 / products, 3) if products else None


def _multiply_adds_of_a_warp(opcode: str) -> float | None:
    """From an opcode's shape: mma.sync is one warp's, wgmma four warps'."""
    parts = opcode.split(".")
    for part in parts[1:]:
        if part in _SYNCHRONOUS:
            return float(prod(_SYNCHRONOUS[part]))
        if shape := re.fullmatch(r"(\d+)x(\d+)x(\d+)", part):
            return prod(int(size) for size in shape.groups()) / 4
    return None
