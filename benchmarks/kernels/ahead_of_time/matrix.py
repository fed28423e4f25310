"""Everything that is compiled ahead of time: cases times tile rows times GPU generations."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

from benchmarks.kernels.ahead_of_time.baseline import row_name
from benchmarks.kernels.ahead_of_time.generations import CAPABILITIES, capability_of
from benchmarks.kernels.compile_case import CompileCase
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.kernels.tiles import DEFAULT, TileConfig, read_tiles

__all__ = ["Target", "targets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One compilation.

    Args:
        case: the kernel and its arguments.
        table: the tile table that the row is from.
        tiles: the row of the case's shape class.
        capability: 90 for sm_90.
    """

    case: CompileCase
    table: str
    tiles: TileConfig
    capability: int

    @property
    def name(self) -> str:
        """Unique among all."""
        return row_name(self.case.name, self.table, self.capability)


def targets(cases: Sequence[CompileCase]) -> Iterator[Target]:
    """Each case with the default tiles for every generation, and with a device's for its own.

    Raises:
        ConfigError: a case's shape class is in no row of the default table.
    """
    for case in cases:
        for table in _tables(case.op):
            tiles = read_tiles(case.op, table).get(case.shape_class)
            if tiles is None and table == DEFAULT:
                raise ConfigError(f'{case.op} has no tiles for shape class "{case.shape_class}"')
            if tiles is None:
                continue
            known = CAPABILITIES if table == DEFAULT else (capability_of(table),)
            for capability in known:
                if capability >= case.lowest_capability:
                    yield Target(case=case, table=table, tiles=tiles, capability=capability)


def _tables(op: str) -> list[str]:
    folder = files("pt2e_quant.kernels").joinpath(op, "tiles")
    return sorted(
        f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")
    )
