"""Provenance: one record per quantized tensor, one per node left float, from rule to kernel.

Reports, `inspect`, comparison and serialization all read this one table.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from torch.fx import GraphModule

from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.schemes import Role

PROVENANCE_KEY = "pt2e_quant.provenance"
"""The key of `gm.meta` that holds the table."""

_VERSION = 1


@dataclass(slots=True, kw_only=True)
class TensorRecord:
    """What happened to one quantized tensor.

    Args:
        name: of the tensor: its producing node, or the parameter's dotted name.
        role: what it is to the operators that use it.
        module: dotted path of the module it belongs to.
        rule: which rule asked for it.
        group: number of the qparam group.
        observer: the observer's class, and its node name in the prepared graph.
        uses: the edges it was asked at: "producer -> consumer", or the node for an output.
        dtype: for example "int8".
        quant_min: smallest integer used.
        quant_max: largest integer used.
        axis: channel axis, None per tensor.
        group_size: how many neighbours share a scale, None if they are not in groups.
        block: lengths of the block that shares a scale (-1: a whole axis), where the fields above
            do not say it.
        scales: how the scales are kept, where they are no float32 numbers.
        is_dynamic: the qparams are chosen at run time.
        scale: real units per integer step; one, or one per channel. Empty where they are many
            (groups: the graph's own constant holds them) or not known (dynamic).
        zero_point: the integer that stands for zero; as many as scale.
        observed: (min, max) that the observer saw.
        steps: algorithm steps applied, in order.
        evidence: which range was chosen by what it costs on calibration data, by how much it is
            better, and what came second; "" where nothing was compared.
        size_before: bytes of the constant in float, 0 for an activation.
        size_after: bytes of the stored integers with their qparams.
        backends: backend to what it made of it.
    """

    name: str
    role: Role
    module: str = ""
    rule: str = ""
    group: int = -1
    observer: str = ""
    uses: list[str] = field(default_factory=list)
    dtype: str = ""
    quant_min: int = 0
    quant_max: int = 0
    axis: int | None = None
    group_size: int | None = None
    block: list[int] = field(default_factory=list)
    scales: str = ""
    is_dynamic: bool = False
    scale: list[float] = field(default_factory=list)
    zero_point: list[int] = field(default_factory=list)
    observed: tuple[float, float] | None = None
    steps: list[str] = field(default_factory=list)
    evidence: str = ""
    size_before: int = 0
    size_after: int = 0
    backends: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class FloatRecord:
    """A node that was left float, and why.

    Args:
        node: its name.
        op: its operator.
        module: dotted path of the module it belongs to.
        reason: why.
        size: bytes of its float constants.
        fix: what to do about the reason, "" where nothing is known.
        is_choice: the backend could run it in integers; float is better for it.
    """

    node: str
    op: str
    module: str
    reason: str
    size: int = 0
    fix: str = ""
    is_choice: bool = False


@dataclass(slots=True, kw_only=True)
class SizeRecord:
    """What one constant of the converted graph takes.

    Args:
        name: of the parameter it comes from.
        dtype: of its elements as they are stored: "int4" where eight bits hold two.
        elements: how many there are.
        size_before: bytes in float; its own bytes if it is not quantized.
        size_after: bytes of its elements as stored; 0 if another name of the same tensor has them.
        qparams: bytes of the scales and zero points that its dequantizes read.
        readers: how many dequantizes read it; 0 if it is not quantized.
        same_as: an earlier constant that holds the same values in memory of its own, "" if none.
    """

    name: str
    dtype: str
    elements: int
    size_before: int
    size_after: int
    qparams: int = 0
    readers: int = 0
    same_as: str = ""

    @property
    def bits_per_element(self) -> float:
        """Bits that an element takes, qparams included."""
        return 8 * (self.size_after + self.qparams) / self.elements if self.elements else 0.0


@dataclass(slots=True, kw_only=True)
class Provenance:
    """The table: quantized tensors, nodes left float, sizes, the passes that ran, their notes."""

    quantizer: str = ""
    tensors: list[TensorRecord] = field(default_factory=list)
    floats: list[FloatRecord] = field(default_factory=list)
    sizes: list[SizeRecord] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def tensor(self, name: str) -> TensorRecord | None:
        """The record of a tensor by name."""
        return next((r for r in self.tensors if r.name == name), None)

    @property
    def float_bytes(self) -> int:
        """Bytes of the constants in float; what has another name for them counts once."""
        return sum(record.size_before for record in self.sizes if record.size_after)

    def set_floats(self, records: Sequence[FloatRecord]) -> None:
        """Replace the list of nodes left float."""
        self.floats = list(records)

    def to_json(self) -> str:
        """As JSON, for keeping inside a file."""
        table = asdict(self)
        for row in table["tensors"]:
            if not row["evidence"]:
                del row["evidence"]  # of most tensors, and kept in each file
        return json.dumps({"version": _VERSION, **table})

    @staticmethod
    def from_json(text: str) -> "Provenance":
        """Read what `to_json` wrote.

        Raises:
            ArtifactError: the text is not a table, or is of a newer version.
        """
        try:
            data = json.loads(text)
            version = data.pop("version")
            if version > _VERSION:
                raise ArtifactError(
                    f"this file's provenance is of version {version}, expected at most {_VERSION}",
                    fix="pip install -U pt2e-quant",
                )
            data["tensors"] = [
                TensorRecord(**{**r, "role": Role(r["role"]), "observed": _pair(r["observed"])})
                for r in data["tensors"]
            ]
            data["floats"] = [FloatRecord(**r) for r in data["floats"]]
            data["sizes"] = [SizeRecord(**r) for r in data.get("sizes", ())]
            return Provenance(**data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"the provenance in this file is damaged: {error}") from error


def _pair(value: Sequence[float] | None) -> tuple[float, float] | None:
    return None if value is None else (value[0], value[1])


def provenance_of(gm: GraphModule) -> Provenance:
    """The table a graph carries; an empty one is attached if there is none."""
    found = gm.meta.setdefault(PROVENANCE_KEY, Provenance())
    assert isinstance(found, Provenance)
    return found
