"""Capture one call as a CUDA graph: at batch 1, launches take most of the time."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.backends.cuda.artifact import CudaArtifact
from pt2e_quant.core.errors import InputError

_WARM_UPS = 3
"""Calls before the capture, so that kernels are compiled and libraries have their workspaces."""


class GraphedCall:
    """A program's call on inputs of one shape, replayed as a CUDA graph; made by `capture_call`.

    Args:
        artifact: the program.
        graph: the captured launches.
        inputs: the tensors that the graph reads.
        outputs: the leaves that it writes.
    """

    def __init__(
        self,
        artifact: CudaArtifact,
        graph: torch.cuda.CUDAGraph,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
    ) -> None:
        self.artifact = artifact
        self.graph = graph
        self.inputs = inputs
        self.outputs = outputs

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the float model; results are copies, so that the next call leaves them be.

        Raises:
            InputError: a shape, dtype or number is not the captured one.
        """
        leaves = self.artifact.capture.bind(args, kwargs)
        for i, (held, given) in enumerate(zip(self.inputs, leaves, strict=True)):
            _copy(i, held, given)
        self.graph.replay()
        copies = [o.clone() if isinstance(o, Tensor) else o for o in self.outputs]
        return self.artifact.capture.unflatten_output(copies)


def _copy(place: int, held: Any, given: Any) -> None:
    if not isinstance(held, Tensor):
        if held != given:
            raise InputError(f"input {place} was captured as {held!r}, found {given!r}")
        return
    if held.shape != given.shape or held.dtype != given.dtype:
        raise InputError(
            f"input {place} was captured as {held.dtype}{list(held.shape)}, "
            f"found {given.dtype}{list(given.shape)}",
            fix="capture_call(artifact, …) once for each shape",
        )
    held.copy_(given, non_blocking=True)


def capture_call(artifact: CudaArtifact, *args: Any, **kwargs: Any) -> GraphedCall:
    """Record one call of a program as a CUDA graph.

    Args:
        artifact: on a GPU. A buffer that a call writes is written by every replay.
        args: inputs of the shapes to capture.
        kwargs: keyword inputs.

    Raises:
        InputError: the program is on no GPU, or the inputs do not fit the captured graph.
    """
    if artifact.device.type != "cuda":
        raise InputError(
            f"a CUDA graph needs a program on a GPU, this one is on {artifact.device}",
            fix='artifact.to("cuda")',
        )
    leaves = artifact.capture.bind(args, kwargs)
    inputs = [v.clone() if isinstance(v, Tensor) else v for v in leaves]
    with torch.cuda.device(artifact.device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch's own
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                artifact.run_leaves(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        artifact.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = artifact.run_leaves(inputs)
        artifact.reset()
    return GraphedCall(artifact, graph, inputs, outputs)
