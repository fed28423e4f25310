"""What travels inside an .onnx file besides the model: the call, the results, provenance."""

import base64
import json
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from pt2e_quant.backends.onnx.passes.carry_state import StateTensor
from pt2e_quant.backends.onnx.results import ResultKind, ResultLeaf, join_results
from pt2e_quant.core.capture import Capture, InputKind
from pt2e_quant.core.checksum import BLANK
from pt2e_quant.core.errors import ArtifactError, InputError
from pt2e_quant.core.provenance import Provenance
from pt2e_quant.flow.report.report import FloatRegion, Report

_PREFIX = "pt2e_quant."
_VERSION = "1"


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
    """Of each leaf of a call: whether the ONNX model takes it."""
    gives_all: bool = field(init=False)
    """Whether the result's leaves are the model's outputs as they stand."""

    def __post_init__(self) -> None:
        taken = taken_inputs(self.capture)
        outputs = [leaf.value for leaf in self.results if leaf.kind is ResultKind.TENSOR]
        in_order = outputs == list(range(len(self.results)))
        object.__setattr__(self, "taken", taken)
        object.__setattr__(self, "gives_all", in_order and not (self.state or self.written))

    @property
    def provenance(self) -> Provenance:
        """What happened to every tensor."""
        return self.report.provenance

    def to_properties(self, constants: Iterable[str]) -> dict[str, str]:
        """As the string properties of an ONNX model that has these constants."""
        texts = {
            "version": _VERSION,
            "checksum": BLANK,
            "capture": self.capture.to_json(),
            "results": json.dumps([asdict(leaf) for leaf in self.results]),
            "state": json.dumps([tensor.to_json() for tensor in self.state]),
            "written": json.dumps(self.written),
            "provenance": pack_provenance(self.provenance, constants),
            "report": json.dumps({**asdict(self.report), "provenance": None}),
        }
        return {_PREFIX + key: text for key, text in texts.items()}

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
                fix="pip install -U pt2e-quant",
            )
        try:
            leaves = json.loads(properties[_PREFIX + "results"])
            report = json.loads(properties[_PREFIX + "report"])
            report["float_regions"] = [
                FloatRegion(**float_region) for float_region in report["float_regions"]
            ]
            report["provenance"] = unpack_provenance(properties[_PREFIX + "provenance"], read)
            return Metadata(
                capture=Capture.from_json(properties[_PREFIX + "capture"]),
                results=tuple(ResultLeaf(ResultKind(x["kind"]), x["value"]) for x in leaves),
                report=Report(**report),
                state=tuple(map(StateTensor.from_json, json.loads(properties[_PREFIX + "state"]))),
                written=tuple(json.loads(properties[_PREFIX + "written"])),
            )
        except InputError as error:
            raise ArtifactError(f"{path}: {error.what}", fix=error.fix) from error
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path}: its description is damaged: {error}") from error

    def result_leaves(self, tensors: Sequence[Tensor]) -> Sequence[Any]:
        """The leaves of the float module's result around the model's outputs."""
        return tensors if self.gives_all else join_results(self.results, tensors)


def taken_inputs(capture: Capture) -> tuple[bool, ...]:
    """Of each leaf of a call: whether the ONNX model takes it."""
    return tuple(info.kind is not InputKind.LITERAL for info in capture.inputs)


_REFERENCE = "constant:"
_SCALE_SUFFIXES = ("_scale", "_scale_column")
"""How the canonical graph names a constant's scales; an embedding's are stored as a column."""


def pack_provenance(provenance: Provenance, constants: Iterable[str]) -> str:
    """As text: compressed, per-channel scales by the name of the constant that holds them.

    Written out, the scales of a small convolutional network take a tenth of its weights' size.
    """
    known = set(constants)
    data = json.loads(provenance.to_json())
    for record in data["tensors"]:
        if len(record["scale"]) < 2:
            continue
        names = [record["name"] + suffix for suffix in _SCALE_SUFFIXES]
        if name := next((n for n in names if n in known), None):
            record["scale"] = _REFERENCE + name
        else:
            # Nine digits say a float32; the seventeen of a Python float only take space.
            record["scale"] = [float(f"{scale:.9g}") for scale in record["scale"]]
        if not any(record["zero_point"]):
            record["zero_point"] = len(record["zero_point"])
    packed = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), level=9)
    return base64.b85encode(packed).decode("ascii")


def unpack_provenance(text: str, read: Callable[[str], list[float]]) -> Provenance:
    """Read what `pack_provenance` wrote; `read` gives a constant's values by its name.

    Raises:
        ArtifactError: the text is damaged.
    """
    try:
        data: Any = json.loads(zlib.decompress(base64.b85decode(text)))
        for record in data["tensors"]:
            if isinstance(record["scale"], str):
                record["scale"] = read(record["scale"].removeprefix(_REFERENCE))
            record["scale"] = np.array(record["scale"], np.float32).tolist()
            if isinstance(record["zero_point"], int):
                record["zero_point"] = [0] * record["zero_point"]
    except (ValueError, TypeError, KeyError, zlib.error) as error:
        raise ArtifactError(f"the provenance in this file is damaged: {error}") from error
    return Provenance.from_json(json.dumps(data))
