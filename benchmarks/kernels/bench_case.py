"""What a unit's `bench.py` lists: how a machine with a GPU checks, times and tunes its kernel.

The unit says what; `benchmarks/gpu.py` walks it. Nothing here needs a GPU or imports Triton.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

import torch

from pt2e_quant.kernels.cost import Cost
from pt2e_quant.kernels.measured import Variant
from pt2e_quant.kernels.tiles import TileConfig

__all__ = ["Bench", "BenchCase", "Bound", "MathUnit", "Peer", "tile_grid"]

T = TypeVar("T")
"""A unit's operands: a tuple or NamedTuple of tensors and numbers, a tree to torch's pytree."""


class MathUnit(StrEnum):
    """What a kernel's operations run on: which of a device's limits they are held to."""

    INT8 = "int8"
    FP8 = "fp8"
    HALF = "half"
    """bf16 and fp16 matrix units."""
    FLOAT32 = "float32"
    """The ordinary units: pooling, norms, elementwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """How far a kernel may be from its reference.

    Args:
        lsb: integer results: steps; of 8-bit floats, codes in between.
        rtol: float results: of the reference's value.
        atol: float results: in real units.
    """

    lsb: int = 0
    rtol: float = 0.0
    atol: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer(Generic[T]):
    """Something else that computes the same, timed beside the kernel.

    Args:
        prepare: from the kernel's operands to a call; casts, packing and compiling happen here and
            are not timed. May raise where a device or a build has no such thing: the results then
            say so.
        is_float: whether it is what the model would run unquantized: the table that lowering reads
            (`kernels/measured.py`) is against the fastest of these.
    """

    prepare: Callable[[T], Callable[[], object]]
    is_float: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchCase(Generic[T]):
    """One shape that is timed.

    Args:
        name: sizes and dtypes in a few words, unique in its unit: "4096x4096x4096 static to int8".
        shape_class: the row of the tile and measured tables that it decides.
        make: operands on a device from a seed; another seed gives other memory of the same shape.
        cost: bytes and operations of one call.
        unit: what the operations run on.
        peers: name to peer. Names: "cuBLAS bf16", "cuBLAS fp16", "torch._int_mm + epilogue",
            "torch._weight_int4pack_mm", "torch._scaled_mm", "torch.compile bf16",
            "cuDNN fp16 channels-last", "cuDNN bf16 channels-last".
        targets: peer name to the ratio (its time over ours) that is aimed at.
    """

    name: str
    shape_class: str
    make: Callable[[torch.device, int], T]
    cost: Cost
    unit: MathUnit
    peers: Mapping[str, Peer[T]]
    targets: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = self.targets.keys() - self.peers.keys()
        assert not unknown, f"{self.name}: targets against absent peers {sorted(unknown)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench(Generic[T]):
    """A unit's `BENCH`.

    Args:
        op: the unit's folder.
        variant: what it writes, where the unit has other benches: lowering reads their ratios
            apart. The tiles are the unit's, which the plain bench alone tunes.
        call: runs the kernel, with the tables' tiles where none are given.
        reference: the definition; it gets CPU tensors.
        draw: operands on a device with sizes drawn from a seed: ragged ones, extreme integers.
        bound: what the two may differ by for operands, leaf by leaf of their results.
        cases: what is timed.
        sweep: shape class to the configurations that tuning tries; those that the compiler or the
            device refuses are passed over and counted.
        lowest_capability: 89 where the kernel computes with fp8, or writes it.
    """

    op: str
    call: Callable[[T, TileConfig | None], object]
    reference: Callable[[T], object]
    draw: Callable[[torch.device, int], T]
    bound: Callable[[T], Bound]
    cases: tuple[BenchCase[T], ...]
    sweep: Mapping[str, tuple[TileConfig, ...]]
    lowest_capability: int = 80
    variant: Variant = Variant.PLAIN

    @property
    def name(self) -> str:
        """Unique among all."""
        return f"{self.op}, {self.variant}" if self.variant else self.op

    def __post_init__(self) -> None:
        names = [case.name for case in self.cases]
        twice = sorted({n for n in names if names.count(n) > 1})
        assert not twice, f"{self.op}: cases of one name {twice}"


def tile_grid(
    num_warps: tuple[int, ...], num_stages: tuple[int, ...], **blocks: tuple[int, ...]
) -> tuple[TileConfig, ...]:
    """Every combination of block sizes, warps and stages.

    >>> len(tile_grid(num_warps=(4, 8), num_stages=(3,), BLOCK_M=(64, 128), BLOCK_N=(64,)))
    4
    """
    chosen = itertools.product(*blocks.values())
    return tuple(
        TileConfig(tuple(zip(blocks, sizes, strict=True)), warps, stages)
        for sizes, warps, stages in itertools.product(chosen, num_warps, num_stages)
    )
