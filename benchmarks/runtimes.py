"""A `.pte` or `.onnx` file loaded into its own runtime, one thread, whoever made the file."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache

import numpy as np
import onnxruntime as ort
import torch
from torch import Tensor


class Runtime(StrEnum):
    """The two runtimes that the benchmarks compare on."""

    EXECUTORCH = "executorch"
    ONNXRUNTIME = "onnxruntime"


@dataclass(frozen=True, slots=True)
class Program:
    """A file's bytes and the loaded program: what every peer and this project reduce to."""

    label: str
    runtime: Runtime
    data: bytes = field(repr=False)
    bind: Callable[..., Callable[[], Sequence[Tensor | np.ndarray]]] = field(repr=False)
    stages: Mapping[str, float] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return len(self.data)

    def run(self, *inputs: Tensor) -> list[Tensor]:
        """Run once on flat inputs and return the flat outputs."""
        return [torch.as_tensor(value).clone() for value in self.bind(*inputs)()]

    def reload(self) -> "Program":
        """Load the same bytes once more."""
        return load_program(self.label, self.runtime, self.data, self.stages)


def load_program(
    label: str, runtime: Runtime, data: bytes, stages: Mapping[str, float] | None = None
) -> Program:
    """Load a file's bytes into its runtime."""
    binder = bind_pte(data) if runtime is Runtime.EXECUTORCH else bind_onnx(data)
    return Program(label, runtime, data, binder, dict(stages or {}))


def bind_pte(data: bytes) -> Callable[..., Callable[[], Sequence[Tensor]]]:
    """Load a `.pte`; the result turns inputs into a call that runs them."""
    # the second import links the portable q/dq kernels that undelegated nodes call
    import executorch.kernels.quantized  # noqa: F401
    from executorch.extension.pybindings import portable_lib

    _limit_executorch_to_one_thread()
    module = portable_lib._load_for_executorch_from_buffer(data)

    def bind(*inputs: Tensor) -> Callable[[], Sequence[Tensor]]:
        arguments = tuple(value.contiguous() for value in inputs)
        return lambda: module.forward(arguments)

    return bind


@cache
def _limit_executorch_to_one_thread() -> None:
    """Once a process: a reset frees the threads that programs which are loaded go on using."""
    from executorch.extension.pybindings import portable_lib

    portable_lib._unsafe_reset_threadpool(1)


def session_options() -> ort.SessionOptions:
    """Return options for one thread and no log noise."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return options


def bind_onnx(data: bytes) -> Callable[..., Callable[[], Sequence[np.ndarray]]]:
    """Load an `.onnx`; the result turns inputs into a call that runs them."""
    session = ort.InferenceSession(data, session_options(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def bind(*inputs: Tensor) -> Callable[[], Sequence[np.ndarray]]:
        feed = {name: value.numpy() for name, value in zip(names, inputs, strict=True)}
        return lambda: session.run(None, feed)

    return bind
