"""The provenance table in an archive, where scales that the graph holds anyway are named only."""

import json
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.provenance import Provenance
from pt2e_quant.graph.meta import attribute

_FEW = 8
"""So many numbers are written out; more of them are looked up in the graph's constants."""

_FIELDS = ("scale", "zero_point")


def provenance_rows(provenance: Provenance, gm: GraphModule) -> Any:
    """The table as JSON."""
    data = json.loads(provenance.to_json())
    for row in data["tensors"]:
        for field in _FIELDS:
            held = _held(gm, row["name"], field)
            if len(row[field]) > _FEW and held == row[field]:
                row[field] = "constant"
    return data


def provenance_of_rows(data: Any, gm: GraphModule) -> Provenance:
    """The table of what `provenance_rows` gave; the graph's constants are there already.

    Raises:
        ArtifactError: it is damaged, or of a newer version.
    """
    for row in data["tensors"]:
        for field in _FIELDS:
            if row[field] == "constant":
                held = _held(gm, row["name"], field)
                if held is None:
                    raise ArtifactError(f'the constant {field} of "{row["name"]}" is missing')
                row[field] = held
    return Provenance.from_json(json.dumps(data))


def _held(gm: GraphModule, name: str, field: str) -> list[Any] | None:
    value = attribute(gm, f"{name}_{field}")
    return value.reshape(-1).tolist() if isinstance(value, Tensor) else None
