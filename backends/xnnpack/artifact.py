"""The `.pte` file as an artifact: run by ExecuTorch's own runtime, provenance inside."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from executorch.runtime import Program
from torch import Tensor
from torch.fx import GraphModule

from pt2e_quant.backends.artifact import Artifact, ShownNode, read_file, write_artifact
from pt2e_quant.backends.profile import Profile
from pt2e_quant.backends.write_back import write_back
from pt2e_quant.backends.xnnpack.contents import (
    ProgramContents,
    read_contents,
    read_named_data,
    read_written_inputs,
)
from pt2e_quant.backends.xnnpack.load_program import ForwardCall, load_program
from pt2e_quant.backends.xnnpack.metadata import (
    METADATA_METHODS,
    unpack_capture,
    unpack_provenance,
)
from pt2e_quant.backends.xnnpack.node_ids import Handles, node_ids
from pt2e_quant.backends.xnnpack.passes.kernel_forms import is_static_int8
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.checksum import check_sum, has_sum, renew_sum
from pt2e_quant.core.errors import ArtifactError, ConfigError, Pt2eQuantError, UnsupportedError
from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.core.stored_figures import read_figures, write_figures
from pt2e_quant.flow.report.report import Report
from pt2e_quant.graph.meta import origin_name
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.graph.subgraphs import copy_graph
from pt2e_quant.passes.qdq.remove_qdq import keep_static_qdq


class XnnpackArtifact(Artifact):
    """An ExecuTorch program.

    Args:
        pte: the serialized program.
        capture: the call it was captured with.
        report: what became of every tensor.
        handles: what its debug handles stand for; None of a file that was loaded.
    """

    def __init__(
        self, pte: bytes, capture: Capture, report: Report, handles: Handles | None = None
    ) -> None:
        super().__init__(capture, report)
        self.pte = pte
        self.handles = handles
        self._call: ForwardCall | None = None
        self._contents: ProgramContents | None = None
        self._lock = Lock()
        """Held while the program is loaded: two of them would have buffers of their own each."""
        self._written: tuple[int, ...] | None = None

    def run_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run with ExecuTorch's runtime; buffers that a call writes keep their values.

        Inputs that the program writes are written here too, as by the float model.

        Raises:
            ArtifactError: the runtime stopped.
        """
        call = self._call or self._open()
        given = call.given(leaves)
        return self._without_inputs(call.run(given), given)

    def _open(self) -> ForwardCall:
        with self._lock:
            if self._call is None:
                try:
                    keeps_state = bool(self.capture.mutated_buffers)
                    self._call = ForwardCall(self.pte, keeps_state=keeps_state)
                except RuntimeError as error:
                    raise ArtifactError(
                        f"ExecuTorch's runtime does not load this program: {error}",
                        fix="lower the model again, with the ExecuTorch of this runtime",
                    ) from error
            return self._call

    def _without_inputs(self, results: list[Any], given: Sequence[Any]) -> Sequence[Any]:
        """The results alone: ExecuTorch returns the inputs that it has written before them."""
        count = len(results) - self.capture.out_spec.num_leaves
        if count <= 0:
            return results
        if self._written is None:
            self._written = read_written_inputs(self.pte)
        write_back(given, self._written[:count], results[:count])
        return results[count:]

    def reset(self) -> None:
        """Forget what earlier calls wrote into buffers: the next call starts from the file."""
        self._call = None

    def state(self) -> Mapping[str, Tensor]:
        """Nothing: ExecuTorch's runtime does not show the buffers that calls write."""
        return {}

    def keep_figures(self) -> None:
        """Write what the check found into the file, which keeps its length."""
        figures = (self.report.sqnr_canonical_db, self.report.sqnr_float_db)
        self.pte = renew_sum(write_figures(self.pte, figures))

    def contents(self) -> ProgramContents:
        """The operators that the file runs, read from the file itself."""
        if self._contents is None:
            self._contents = read_contents(self.pte)
        return self._contents

    def float_operators(self, gm: GraphModule) -> frozenset[str]:
        """The nodes that the delegates compute on floats, and those outside of them."""
        if self.handles is None:
            return super().float_operators(gm)
        return self.handles.floats(gm, self.contents().ops(), self.handles.kernels.values())

    def as_run(self, gm: GraphModule) -> GraphModule:
        """The graph without the q/dq of activations that are no int8, which run in float."""
        made = copy_graph(gm)
        run_passes(made, (keep_static_qdq(is_static_int8),))
        return made

    def node_ids(self, file: str) -> Mapping[str, ShownNode]:
        """The places of the program's nodes among the numbered ones of the file."""
        if not file:
            raise ConfigError(
                "Model Explorer names the graphs of a .pte by its file, and no file is named",
                fix='write_node_data(…, file="model.pte")',
            )
        if self.handles is None:
            raise UnsupportedError(
                "a .pte that was loaded does not say which nodes its operators come from",
                fix="give the artifact that lower or quantize returned",
            )
        ids = node_ids(self.contents(), self.handles, file)
        nodes = () if self.quantized is None else self.quantized.graph.nodes
        last = {origin_name(node): node.name for node in nodes if not is_qdq(node)}
        return {name: ids[origin] for origin, name in last.items() if origin in ids} | ids

    def time_operators(self, leaves: Sequence[Any]) -> Profile:
        """Refuse: the wheel's runtime keeps no times.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "ExecuTorch's wheel is built without its event tracer: it cannot report how long the "
            "operators of a .pte take",
            fix='profile the same recipe on ONNX Runtime (quantize(…, backend="onnx")), or time '
            "whole calls: pt2e-quant bench model.pte",
        )

    def save(self, path: str | Path) -> None:
        """Write the `.pte`: a temporary file beside it first, then renamed.

        Raises:
            ArtifactError: the path cannot be written.
        """
        write_artifact(path, self.pte)

    @property
    def size_bytes(self) -> int:
        """Bytes of the `.pte`."""
        return len(self.pte)


def load(path: str | Path) -> XnnpackArtifact:
    """Read a `.pte` that an artifact saved.

    Raises:
        ArtifactError: the file is missing, damaged or not one of ours.
    """
    pte = read_file(path)
    _check_bytes(pte, path)
    try:
        program = load_program(pte)
        names = set(program.method_names)
    except RuntimeError as error:
        raise ArtifactError(
            f'"{path}" is no ExecuTorch program: {error}',
            fix="give a .pte file",
        ) from error
    if missing := set(METADATA_METHODS) - names:
        raise ArtifactError(
            f'"{path}" holds no {sorted(missing)}: it was not written by this package',
            fix="run it with executorch.runtime, or lower the model again",
        )
    try:
        stored = [_returned(program, name) for name in METADATA_METHODS]
        capture = unpack_capture(stored[0])
        provenance = unpack_provenance(stored[1], read_named_data(pte))
    except Pt2eQuantError as error:
        raise ArtifactError(f'"{path}": {error.what}', fix=error.fix) from error
    except RuntimeError as error:
        raise ArtifactError(f'the metadata in "{path}" is damaged: {error}') from error
    report = Report(backend="XNNPACK", provenance=provenance, size_bytes=len(pte))
    report.note_record(provenance)
    report.sqnr_canonical_db, report.sqnr_float_db = read_figures(pte)
    artifact = XnnpackArtifact(pte, capture, report)
    count_operators(report, artifact.contents())
    return artifact


_MAGIC = b"ET"
"""The format's name without its version, at byte 4 of a program."""


def _check_bytes(pte: bytes, path: str | Path) -> None:
    """Refuse what is not as it was written before the runtime, which trusts it, reads it.

    Raises:
        ArtifactError: the file is damaged or not one of ours.
    """
    if has_sum(pte):
        check_sum(pte, path)
    elif pte[4:6] != _MAGIC:
        raise ArtifactError(f'"{path}" is no ExecuTorch program', fix="give a .pte file")
    else:
        raise ArtifactError(
            f'"{path}" holds no checksum: it was not written by this package, or is damaged',
            fix="run it with executorch.runtime, or lower the model again",
        )


def _returned(program: Program, method: str) -> bytes:
    """The bytes that a constant method returns."""
    found: bytes = program.load_method(method).execute([])[0].numpy().tobytes()
    return found


def count_operators(report: Report, contents: ProgramContents) -> None:
    """Fill in a report's operator counts from a program's contents."""
    report.integer_ops = dict(contents.integer_ops())
    report.float_ops = _merged(contents.float_ops(), contents.kernels)


def _merged(delegated: Mapping[str, int], kernels: Mapping[str, int]) -> dict[str, int]:
    outside = {f"{name} (portable)": count for name, count in kernels.items()}
    return {**delegated, **outside}
