"""Programs in ExecuTorch's runtime, with every kernel that the lowering may use."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

# Registers quantized_decomposed::embedding_byte and its like; nothing of the module is used.
import executorch.kernels.quantized  # noqa: F401
import torch
from executorch.extension.pybindings import portable_lib
from executorch.runtime import Program, Runtime
from torch import Tensor

from pt2e_quant.backends.quiet import without_stderr
from pt2e_quant.core.errors import ArtifactError


def load_program(pte: bytes) -> Program:
    """A program to load methods of; keep it as long as its methods.

    Raises:
        RuntimeError: it is damaged or no ExecuTorch program.
    """
    _start_threads()
    return Runtime.get().load_program(pte)


@cache
def _start_threads() -> None:
    """Make ExecuTorch's pool of threads here, where its remarks on unknown CPUs can be kept."""
    with without_stderr():
        portable_lib._threadpool_get_thread_count()


class ForwardCall:
    """A program's `forward`, loaded once; buffers that a call writes keep their values.

    Args:
        pte: any program, also one without our metadata.

    Raises:
        RuntimeError: it is damaged or no ExecuTorch program, or the runtime does not load it.
    """

    def __init__(self, pte: bytes) -> None:
        # A method does not keep its program alive, and crashes without it.
        self._program = load_program(pte)
        method = self._program.load_method("forward")
        assert method is not None
        self._execute = method.execute
        self._input_count = method.metadata.num_inputs()
        self._lock = Lock()
        """A method computes in memory of its own: one call at a time."""

    def given(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """The leaves of a call that the program takes.

        An argument that was None at export: a program has it as an input, or not at all.
        """
        if len(leaves) == self._input_count:
            return leaves
        return [leaf for leaf in leaves if leaf is not None]

    def run(self, given: Sequence[Any]) -> list[Any]:
        """Run on what `given` returned; results are the caller's own memory.

        Raises:
            ArtifactError: the runtime stopped.
        """
        inputs = [_readable(leaf) if isinstance(leaf, Tensor) else leaf for leaf in given]
        try:
            with self._lock:
                return list(self._execute(inputs))
        except RuntimeError as error:
            raise ArtifactError(
                f"ExecuTorch's runtime stopped: {error}",
                fix="see what it printed above: its kernels name the operator and what they miss",
            ) from error


def _readable(tensor: Tensor) -> Tensor:
    """A tensor that ExecuTorch accepts: it rejects parameters, unless they are detached."""
    if type(tensor) is not Tensor or tensor.requires_grad:
        tensor = tensor.detach()
    # Without elements it is contiguous with any strides, at which the runtime ends the process.
    return tensor.contiguous() if tensor.numel() else torch.empty(tensor.shape, dtype=tensor.dtype)


def open_file(path: Path, *, threads: int) -> ForwardCall:
    """Any `.pte`, also one without our metadata, opened to be run: what benchmarks compare with.

    Args:
        path: of the `.pte`.
        threads: of ExecuTorch's pool, which the whole process shares.

    Raises:
        ArtifactError: the file is damaged or no ExecuTorch program.
    """
    _start_threads()
    portable_lib._unsafe_reset_threadpool(threads)
    try:
        # The bytes, not the path: the runtime maps a path, and a file replaced later would crash.
        return ForwardCall(path.read_bytes())
    except (OSError, RuntimeError) as error:
        raise ArtifactError(
            f"{path} is damaged or no ExecuTorch program: {error}", fix="give a .pte file"
        ) from error
