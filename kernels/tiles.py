"""Tile sizes of Triton kernels: tables in JSON, one a kernel and device; none tuned at run time.

`kernels/<op>/tiles/default.json` maps a shape class to a configuration; a file named after a GPU
(`nvidia_h200.json`, as `slug` writes its name) holds what was measured there and goes first.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

import torch

from pt2e_quant.core.errors import ConfigError

DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Compile options of a kernel for a shape class.

    Args:
        blocks: constexpr name to value: BLOCK_M, BLOCK_N, …
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
    """

    blocks: tuple[tuple[str, int], ...]
    num_warps: int
    num_stages: int

    def __getitem__(self, name: str) -> int:
        return dict(self.blocks)[name]

    def options(self) -> dict[str, int]:
        """Everything as keyword arguments of a launch."""
        return {**dict(self.blocks), "num_warps": self.num_warps, "num_stages": self.num_stages}


def rows_class(rows: int) -> str:
    """The shape class of a product with M rows: what bounds it changes with M.

    >>> [rows_class(m) for m in (1, 16, 17, 64, 256, 257)]
    ['decode', 'decode', 'skinny', 'skinny', 'medium', 'large']
    """
    bounds = (("decode", 16), ("skinny", 64), ("medium", 256))
    return next((name for name, most in bounds if rows <= most), "large")


def columns_class(columns: int) -> str:
    """The shape class of a kernel that works on whole rows of K elements: how many fit a tile.

    >>> [columns_class(k) for k in (64, 768, 4096, 14336)]
    ['narrow', 'row', 'wide', 'long']
    """
    bounds = (("narrow", 128), ("row", 1024), ("wide", 4096))
    return next((name for name, most in bounds if columns <= most), "long")


def elements_class(elements: int) -> str:
    """The shape class of an elementwise kernel: whether large tiles leave processors idle.

    >>> [elements_class(n) for n in (1, 2**18, 2**18 + 1)]
    ['small', 'small', 'large']
    """
    return "small" if elements <= 2**18 else "large"


def device_slug(name: str) -> str:
    """A GPU's name as a file name.

    >>> device_slug("NVIDIA H200")
    'nvidia_h200'
    """
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


@cache
def read_tiles(op: str, device: str = DEFAULT) -> Mapping[str, TileConfig]:
    """The table of a kernel for a device; empty if that was never measured."""
    file = files("pt2e_quant.kernels").joinpath(op, "tiles", f"{device}.json")
    if not file.is_file():
        return {}
    rows = json.loads(file.read_text())
    return {name: _config(dict(row)) for name, row in rows.items()}


def _config(row: dict[str, int]) -> TileConfig:
    warps, stages = row.pop("num_warps"), row.pop("num_stages")
    return TileConfig(tuple(row.items()), warps, stages)


@cache
def _device_name(index: int | None) -> str:
    return device_slug(torch.cuda.get_device_name(index))


def tiles_for(op: str, device: torch.device, shape_class: str) -> TileConfig:
    """The configuration for a shape class on a device: measured there, else the default.

    Raises:
        ConfigError: the kernel has no such shape class.
    """
    measured = read_tiles(op, _device_name(device.index)) if device.type == "cuda" else {}
    found = measured.get(shape_class) or read_tiles(op).get(shape_class)
    if found is None:
        raise ConfigError(f'{op} has no tiles for shape class "{shape_class}"')
    return found
