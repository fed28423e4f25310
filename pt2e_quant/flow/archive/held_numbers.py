"""Numbers of the provenance that the graph beside it holds as constants: named, not repeated."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from pt2e_quant.core.provenance_table import Read, Refer
from pt2e_quant.graph.meta import attribute

_FEW = 8
"""So many numbers are written out; more of them are looked up in the graph's constants."""

_HELD = "constant"


def refer_to(gm: GraphModule) -> Refer:
    """The argument of `Provenance.to_json` for a file that holds a graph."""

    def refer(name: str, field: str, values: Sequence[float]) -> str:
        return _HELD if len(values) > _FEW and _held(gm, name, field) == values else ""

    return refer


def read_from(gm: GraphModule) -> Read:
    """The argument of `Provenance.from_json` for a graph that has its constants."""

    def read(name: str, field: str, word: str) -> Sequence[float]:
        held = _held(gm, name, field) if word == _HELD else None
        if held is None:
            raise ValueError(f'the constant {field} of "{name}" is missing')
        return held

    return read


def _held(gm: GraphModule, name: str, field: str) -> list[Any] | None:
    value = attribute(gm, f"{name}_{field}")
    return value.reshape(-1).tolist() if isinstance(value, Tensor) else None
