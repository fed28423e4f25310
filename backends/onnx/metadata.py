"""The metadata in an .onnx file: the call, the results, provenance."""

import base64
import json
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor

from pt2e_quant.backends.onnx.passes.carry_state import StateTensor
from pt2e_quant.backends.onnx.results import ResultKind, ResultLeaf, join_results
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.checksum import BLANK
from pt2e_quant.core.errors import ArtifactError, InputError
from pt2e_quant.core.input_info import InputKind
from pt2e_quant.core.provenance import Provenance, RecordKind, choose_record
from pt2e_quant.core.provenance_table import to_text
from pt2e_quant.flow.report.report import FloatRegion, Report

_PREFIX = "pt2e_quant."
_VERSION = "2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """The call's and the result's structure, and the table of quantized tensors.

    Args:
        capture: of the call.
        results: the leaves of the result, in order.
        report: what ONNX Runtime made of the model.
        state: the buffers that calls write: the model's last inputs and outputs.
        written: positions of the inputs that calls write: outputs behind the results.
    """

    capture: Capture
    results: tuple[ResultLeaf, ...]
    report: Report
    state: tuple[StateTensor, ...] = ()
    written: tuple[int, ...] = ()

    taken: tuple[bool, ...] = field(init=False)
    """A flag for each leaf of a call: True if the ONNX model takes it."""
    gives_all: bool = field(init=False)
    """True if the result's leaves are the model's outputs, in order."""

    def __post_init__(self) -> None:
        taken = taken_inputs(self.capture)
        outputs = [leaf.value for leaf in self.results if leaf.kind is ResultKind.TENSOR]
        in_order = outputs == list(range(len(self.results)))
        object.__setattr__(self, "taken", taken)
        object.__setattr__(self, "gives_all", in_order and not (self.state or self.written))

    @property
    def provenance(self) -> Provenance:
        """The records of all tensors."""
        return self.report.provenance

    def to_properties(
        self, constants: Iterable[str], record: RecordKind | None = None
    ) -> dict[str, str]:
        """The string properties of an ONNX model that has these constants.

        Args:
            constants: their names.
            record: how much of the provenance is kept; see `choose_record`. Less than all of it
                is noted in the report.
        """
        known = set(constants)
        texts: dict[str, str] = {}
        packed: Provenance | None = None

        def pack(table: Provenance) -> int:
            nonlocal packed
            texts["record"], packed = self._pack(table, known), table
            return len(texts["record"])

        kept = choose_record(self.provenance, record, pack)
        if kept is not packed:
            pack(kept)
        self.report.note_record(kept)
        texts |= {"version": _VERSION, "checksum": BLANK}
        return {_PREFIX + key: text for key, text in texts.items()}

    def _pack(self, table: Provenance, constants: Collection[str]) -> str:
        """Everything, with as much of the provenance as is kept, compressed."""

        def refer(name: str, field: str, values: Sequence[float]) -> str:
            # Written out, the scales of a small convolutional network take a tenth of its weights.
            suffixes = _SCALE_SUFFIXES if field == "scale" and len(values) > 1 else ()
            return next((end for end in suffixes if name + end in constants), "")

        report = replace(self.report, provenance=Provenance())
        if table.kept is not RecordKind.FULL:
            report = replace(report, float_regions=[], notes=[])
        if table.kept is RecordKind.NONE:
            report = replace(report, integer_ops={}, float_ops={})
        data = {
            "capture": self.capture.to_json(),
            "results": [asdict(leaf) for leaf in self.results],
            "state": [tensor.to_json() for tensor in self.state],
            "written": self.written,
            "provenance": table.to_json(refer),
            "report": {**asdict(report), "provenance": None, "inputs": []},
        }
        return base64.b85encode(zlib.compress(to_text(data).encode(), level=9)).decode("ascii")

    @staticmethod
    def from_properties(
        properties: Mapping[str, str], path: str, read: Callable[[str], list[float]]
    ) -> "Metadata":
        """Read what `to_properties` wrote; `read` gives a constant of the model by its name.

        Raises:
            ArtifactError: the file is not ours, of a newer version, or damaged.
        """
        if _PREFIX + "version" not in properties:
            raise ArtifactError(
                f"{path} was not written by this package: it has no description of its call",
                fix="run it with onnxruntime.InferenceSession",
            )
        if properties[_PREFIX + "version"] != _VERSION:
            raise ArtifactError(
                f"{path} is of version {properties[_PREFIX + 'version']}, "
                f"this package reads {_VERSION}",
                fix="quantize the model again, or pip install -U pt2e-quant",
            )
        try:
            return _unpack(properties[_PREFIX + "record"], read)
        except (InputError, ArtifactError) as error:
            raise ArtifactError(f"{path}: {error.what}", fix=error.fix) from error
        except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
            raise ArtifactError(f"{path}: its description is damaged: {error}") from error

    def result_leaves(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        """The leaves of the float module's result around the model's outputs."""
        return tensors if self.gives_all else join_results(self.results, tensors)


def taken_inputs(capture: Capture) -> tuple[bool, ...]:
    """A flag for each leaf of a call: True if the ONNX model takes it."""
    return tuple(info.kind is not InputKind.LITERAL for info in capture.inputs)


_SCALE_SUFFIXES = ("_scale", "_scale_column")
"""The canonical graph's names of a constant's scales; an embedding's are stored as a column."""


def _unpack(text: str, read: Callable[[str], list[float]]) -> Metadata:
    data: Any = json.loads(zlib.decompress(base64.b85decode(text)))
    table = Provenance.from_json(data["provenance"], lambda name, _, end: read(name + end))
    fields = data["report"]
    fields["float_regions"] = [FloatRegion(**region) for region in fields["float_regions"]]
    report = Report(**{**fields, "provenance": table})
    report.note_record(table)
    return Metadata(
        capture=Capture.from_json(data["capture"]),
        results=tuple(ResultLeaf(ResultKind(x["kind"]), x["value"]) for x in data["results"]),
        report=report,
        state=tuple(map(StateTensor.from_json, data["state"])),
        written=tuple(data["written"]),
    )
