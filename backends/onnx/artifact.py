"""An ONNX file run by ONNX Runtime, with the float module's own call."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch import Tensor
from torch.fx import GraphModule

from pt2e_quant.backends.artifact import Artifact, ShownNode, read_file, write_artifact
from pt2e_quant.backends.onnx.metadata import Metadata
from pt2e_quant.backends.onnx.profile_session import profile_session
from pt2e_quant.backends.onnx.report import read_islands
from pt2e_quant.backends.onnx.runtime import (
    OperatorKind,
    SessionCall,
    open_session,
    optimize,
    to_ort,
)
from pt2e_quant.backends.profile import Profile
from pt2e_quant.backends.write_back import write_back
from pt2e_quant.core.checksum import check_sum, has_sum
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.provenance import FloatOperator

ReadValues: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
"""Runs a call's leaves; returns values inside."""


class OnnxArtifact(Artifact):
    """A quantized ONNX model.

    Args:
        model: the file's bytes.
        metadata: the call and result structure and the report that the file carries.
        session: an open session of the model; opened at the first run if None.
        threads: of that session, 0 leaves the choice to ONNX Runtime.
    """

    def __init__(
        self,
        model: bytes,
        metadata: Metadata,
        *,
        session: onnxruntime.InferenceSession | None = None,
        threads: int = 0,
    ) -> None:
        super().__init__(metadata.capture, metadata.report)
        self.model = model
        self.metadata = metadata
        self.threads = threads
        self._call = SessionCall(session) if session is not None else None
        self._state: list[onnxruntime.OrtValue] | None = None
        self._lock = Lock()
        """Held while a session is opened, and while a call reads the state and writes it."""

    @property
    def session(self) -> onnxruntime.InferenceSession:
        """The ONNX Runtime session."""
        return self._open().session

    def _open(self) -> SessionCall:
        with self._lock:
            if self._call is None:
                self._call = SessionCall(open_session(self.model, threads=self.threads))
            return self._call

    @property
    def size_bytes(self) -> int:
        """Bytes of the file."""
        return len(self.model)

    def float_operators(self, gm: GraphModule) -> frozenset[str]:
        """The nodes whose values ONNX Runtime computes in float, integer products rescaled too."""
        made = optimize(self.model)[0].real_values(products=True)
        return frozenset(node.name for node in gm.graph.nodes if node.name in made)

    def islands_in_file(self) -> tuple[list[FloatOperator], int]:
        """The operators of the file that ONNX Runtime computes in float, and how many it does not.

        Dynamic sizes count as in the example that the model was captured with.
        """
        optimized, _ = optimize(self.model)
        floats = optimized.real_values(products=False)
        integers = optimized.count(OperatorKind.INTEGER).total()
        return read_islands(self.model, floats, self.capture), integers

    def node_ids(self, file: str) -> Mapping[str, ShownNode]:
        """The names of the nodes, by the values that they make; inputs as they are shown."""
        graph = onnx.load_model_from_string(self.model).graph
        names = {value.name: f"[value] {value.name}" for value in graph.input}
        names |= {value: node.name for node in graph.node for value in node.output}
        return {value: ShownNode(node=name) for value, name in names.items()}

    def limit_threads(self, threads: int) -> None:
        """Run on so many threads from now on; 0 leaves the choice to ONNX Runtime."""
        self.threads = threads
        self._call = None

    def run_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run on the call's leaves; results are CPU tensors. Buffers keep what a call writes.

        Inputs that the model writes are written here too, as by the float model.
        """
        call = self._call or self._open()
        feeds = list(compress(leaves, self.metadata.taken))
        if self.metadata.state:
            results = self._run_with_state(call, feeds)
        else:
            results = call.run(feeds)
        if written := self.metadata.written:
            write_back(leaves, written, results[len(results) - len(written) :])
        return self.metadata.result_leaves(results)

    def values_reader(
        self, quantized: Sequence[str], plain: Sequence[str]
    ) -> tuple[tuple[str, ...], ReadValues]:
        """Values inside the model, by the names of the nodes of the graph that it was made of.

        A model with state gives none.

        Args:
            quantized: names of values that are wanted behind their dequantizes.
            plain: names of others; one that the model quantizes all the same is another value.

        Returns:
            The names that the model has, and what gives their values for a call's leaves.
        """
        found, model = with_outputs(self.model, quantized, plain)
        if self.metadata.state or not found:
            return (), self.run_leaves
        call = SessionCall(open_session(model, threads=self.threads))

        def read(leaves: Sequence[Any]) -> Sequence[Any]:
            given = call.run(list(compress(leaves, self.metadata.taken)))
            return given[len(given) - len(found) :]

        return found, read

    def _run_with_state(self, call: SessionCall, feeds: Sequence[Any]) -> list[Tensor]:
        with self._lock:
            if self._state is None:
                self._state = [to_ort(tensor.initial) for tensor in self.metadata.state]
            results, self._state = call.run_with_state(feeds, self._state)
        return results

    def time_operators(self, leaves: Sequence[Any]) -> Profile:
        """Time a call with ONNX Runtime's profiler, in a session of its own."""
        given: list[Any] = [
            *compress(leaves, self.metadata.taken),
            *(tensor.initial for tensor in self.metadata.state),
        ]
        known = () if self.quantized is None else tuple(self.quantized.graph.nodes)
        return profile_session(self.model, given, threads=self.threads, known=known)

    def reset(self) -> None:
        """Forget what earlier calls wrote into buffers: the next call starts from the file."""
        self._state = None

    def state(self) -> Mapping[str, Tensor]:
        """The buffers that calls write; what ONNX Runtime holds, copied."""
        if self._state is None:
            return {tensor.name: tensor.initial for tensor in self.metadata.state}
        pairs = zip(self.metadata.state, self._state, strict=True)
        return {tensor.name: torch.from_numpy(value.numpy()) for tensor, value in pairs}

    def save(self, path: str | Path) -> None:
        """Write the .onnx file under a temporary name, then rename it.

        Raises:
            ArtifactError: the path cannot be written.
        """
        write_artifact(path, self.model)


def read_artifact(path: Path, *, threads: int = 0) -> OnnxArtifact:
    """Read a file that `OnnxArtifact.save` wrote.

    Raises:
        ArtifactError: the file is missing, damaged or not one of ours.
    """
    model = read_file(path)
    if has_sum(model):
        check_sum(model, path)
    try:
        session = open_session(model, threads=threads)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error.what}", fix="give an .onnx file") from error
    properties = session.get_modelmeta().custom_metadata_map
    metadata = Metadata.from_properties(properties, str(path), _constants(model))
    check_sum(model, path)
    metadata.report.size_bytes = len(model)
    return OnnxArtifact(model, metadata, session=session, threads=threads)


def _constants(model: bytes) -> Callable[[str], list[float]]:
    """Reads constants of a model by name."""
    tensors = {t.name: t for t in onnx.load_from_string(model).graph.initializer}

    def read(name: str) -> list[float]:
        values: list[float] = numpy_helper.to_array(tensors[name]).reshape(-1).tolist()
        return values

    return read


def with_outputs(
    model: bytes, quantized: Sequence[str], plain: Sequence[str]
) -> tuple[tuple[str, ...], bytes]:
    """A model that gives values inside behind its results; see `OnnxArtifact.values_reader`.

    Returns:
        The names that the model has, in the order of its new outputs, and its bytes.
    """
    graph = (proto := onnx.load_from_string(model)).graph
    made = {output for node in graph.node for output in node.output}
    integers = {n.input[0]: n.output[0] for n in graph.node if n.op_type == "QuantizeLinear"}
    floats = {n.input[0]: n.output[0] for n in graph.node if n.op_type == "DequantizeLinear"}
    behind = {name: floats[value] for name, value in integers.items() if value in floats}
    wanted = {name: behind[name] for name in quantized if name in behind}
    wanted |= {name: name for name in plain if name not in integers}
    found = {name: value for name, value in wanted.items() if value in made}
    given = {output.name for output in graph.output}
    for at, value in enumerate(found.values()):
        if value in given:  # it is one output only
            copied = f"value_{at}"
            graph.node.append(onnx.helper.make_node("Identity", [value], [copied]))
            value = copied
        given.add(value)
        graph.output.append(onnx.ValueInfoProto(name=value))
    return tuple(found), proto.SerializeToString()
