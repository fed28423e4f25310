"""An ONNX file run by ONNX Runtime, with the float module's own call."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from pathlib import Path
from threading import Lock
from typing import Any

import onnx
import onnxruntime
import torch
from onnx import numpy_helper
from torch import Tensor

from pt2e_quant.backends.artifact import Artifact, read_file, write_artifact
from pt2e_quant.backends.onnx.metadata import Metadata
from pt2e_quant.backends.onnx.profile_session import profile_session
from pt2e_quant.backends.onnx.runtime import SessionCall, open_session, to_ort
from pt2e_quant.backends.profile import Profile
from pt2e_quant.backends.write_back import write_back
from pt2e_quant.core.checksum import check_sum, has_sum
from pt2e_quant.core.errors import ArtifactError


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
