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

Sizes = tuple[int, ...]


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

    A delegate plans its memory anew where a tensor outgrows the largest size that it ever had. What
    shares memory, and how much scratch memory an operator has, is then decided for that call alone:
    at a batch of 1, a sum may lie where an operand of one row does. A later call that is larger in
    another dimension outgrows nothing, and writes over other tensors. So before a call whose sizes
    are neither all at least nor all at most what is planned, one call at the largest of both plans
    for either (`start_small` does so for a single dynamic size).

    Args:
        pte: any program, also one without our metadata.
        keeps_state: whether calls write buffers: then no call is made but those asked for.

    Raises:
        RuntimeError: it is damaged or no ExecuTorch program, or the runtime does not load it.
    """

    def __init__(self, pte: bytes, *, keeps_state: bool = False) -> None:
        # A method does not keep its program alive, and crashes without it.
        self._program = load_program(pte)
        self._keeps_state = keeps_state
        self._load()
        self._lock = Lock()
        """A method computes in memory of its own: one call at a time."""

    def _load(self) -> None:
        method = self._program.load_method("forward")
        assert method is not None
        self._execute = method.execute
        self._input_count = method.metadata.num_inputs()
        self._planned: list[Sizes] | None = None

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
            ArtifactError: the runtime stopped; or the program keeps buffers, and its memory is
                planned for calls of other sizes.
        """
        inputs = [_readable(leaf) if isinstance(leaf, Tensor) else leaf for leaf in given]
        try:
            with self._lock:
                planned = self._plan_for(inputs)
                results = list(self._execute(inputs))
                self._planned = planned
                return results
        except RuntimeError as error:
            raise ArtifactError(
                f"ExecuTorch's runtime stopped: {error}",
                fix="see what it printed above: its kernels name the operator and what they miss",
            ) from error

    def _plan_for(self, inputs: Sequence[Any]) -> list[Sizes]:
        """Have memory planned for all sizes so far together; returns what a call then leaves."""
        sizes: list[Sizes] = [
            tuple(leaf.shape) if isinstance(leaf, Tensor) else () for leaf in inputs
        ]
        if self._planned is None or self._planned == sizes:
            return sizes
        largest = [tuple(map(max, *pair)) for pair in zip(self._planned, sizes, strict=True)]
        if largest in (self._planned, sizes):
            return largest
        return largest if self._call_at(largest, inputs) else sizes

    def _call_at(self, sizes: Sequence[Sizes], inputs: Sequence[Any]) -> bool:
        """Call with values like an input's; False if the method had to be loaded anew."""
        if self._keeps_state:
            raise ArtifactError(
                f"XNNPACK would compute wrong results: its memory is planned for inputs of sizes "
                f"{_shown(self._planned or ())}, and this call's are neither all larger nor all "
                f"smaller; planning for both takes a call of {_shown(sizes)}, which would write "
                "the program's buffers",
                fix="after a reset, call it with the largest sizes first; or export it with one "
                "dynamic size",
            )
        grown = [
            _tiled(leaf, size) if isinstance(leaf, Tensor) else leaf
            for leaf, size in zip(inputs, sizes, strict=True)
        ]
        try:
            self._execute(grown)
        except RuntimeError:  # these sizes do not fit together: begin anew, planned for nothing
            self._load()
            return False
        return True


def _tiled(tensor: Tensor, sizes: Sizes) -> Tensor:
    """Values of a tensor again and again: indices stay valid, divisors are not zero."""
    if not tensor.numel():
        return tensor.new_zeros(sizes)
    for dim, size in enumerate(sizes):
        tensor = tensor.index_select(dim, torch.arange(size) % tensor.shape[dim])
    return tensor


def _shown(sizes: Sequence[Sizes]) -> str:
    return ", ".join(str(tuple(size)) for size in sizes)


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
        return ForwardCall(path.read_bytes(), keeps_state=True)  # it may
    except (OSError, RuntimeError) as error:
        raise ArtifactError(
            f"{path} is damaged or no ExecuTorch program: {error}", fix="give a .pte file"
        ) from error
