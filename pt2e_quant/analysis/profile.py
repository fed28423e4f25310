"""Profile a call of an artifact on its runtime, operator by operator."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.profile import Profile
from pt2e_quant.backends.profile_module import profile_module
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import InputError
from pt2e_quant.core.read_capture import call_graph, capture_of
from pt2e_quant.core.unlift import graph_module_of
from pt2e_quant.flow.calibrate.calibrate import preserve_buffers
from pt2e_quant.flow.calibrate.pick_inputs import InputPick, bind_batch


def profile(
    artifact: Artifact | GraphModule | ExportedProgram,
    batch: Any,
    *,
    inputs: InputPick | None = None,
) -> Profile:
    """Time each operator of a call.

    An artifact is timed by its runtime: ONNX Runtime by its own profiler, the modules of `cpu`
    and `cuda` operator by operator. Operators have the names of the canonical graph's nodes. A
    program of torch.export, float or converted, is timed in torch.

    Args:
        artifact: of `quantize` or `lower`; or a program of torch.export.
        batch: one batch, as `calibrate` takes it.
        inputs: what of the batch the model takes, as `calibrate` has it.

    Returns:
        Every operator with its node, its module, its kind (integer, float, convert, move), the
        bytes that it reads and writes, and the median time; prints as a table.

    Raises:
        InputError: the batch does not fit the program.
        UnsupportedError: the runtime does not tell the time of an operator.
    """
    if isinstance(artifact, Artifact):
        leaves = bind_batch(artifact.capture, batch, inputs, call="profile")
        args, kwargs = pytree.tree_unflatten(leaves, artifact.capture.in_spec)
        return artifact.profile(*args, **kwargs)
    if isinstance(artifact, ExportedProgram):
        artifact = graph_module_of(artifact)
    if not isinstance(artifact, GraphModule):
        raise InputError(
            f"profile takes an artifact or a program of torch.export, found a "
            f"{type(artifact).__name__}",
            fix="pq.profile(torch.export.export(model, args), batch)"
            if isinstance(artifact, nn.Module)
            else "artifact = pq.quantize(…); pq.profile(artifact, batch)",
        )
    capture = capture_of(artifact)
    return profile_graph(artifact, capture, bind_batch(capture, batch, inputs, call="profile"))


def profile_graph(gm: GraphModule, capture: Capture, leaves: Sequence[Any]) -> Profile:
    """Time each operator of a call of a graph in torch.

    Args:
        gm: of torch.export, float or converted.
        capture: its call.
        leaves: of one call, bound.
    """

    def call() -> None:
        call_graph(gm, capture, leaves)

    with torch.no_grad(), preserve_buffers(gm, capture):
        call()
        return profile_module(gm, capture.positional(leaves), runtime="torch", call=call)
