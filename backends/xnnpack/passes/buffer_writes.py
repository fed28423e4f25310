"""The buffers that a graph writes: in place where ExecuTorch can, and what they hold at first."""

from typing import Any

import torch
from executorch.exir.dialects._ops import ops as exir_ops
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Node

_PUT = exir_ops.edge.aten.index_put.default
_VIEWS = frozenset(
    {
        exir_ops.edge.aten.view_copy.default,
        exir_ops.edge.aten.squeeze_copy.dims,
        exir_ops.edge.aten.squeeze_copy.dim,
        exir_ops.edge.aten.unsqueeze_copy.default,
        exir_ops.edge.aten.alias_copy.default,
    }
)
"""Operators whose result ExecuTorch may place where their input is."""


def can_write_in_place(ep: ExportedProgram) -> bool:
    """Whether ExecuTorch may write every value that is put at indices into its buffer.

    Its pass does so wherever no later operator reads what is overwritten. It does not ask
    whether that is a result of the program, or is read through a view. Its kernel (1.4) takes
    one index of one dimension for whole rows, without a sum; it fails at run time on others.
    """
    signature = ep.graph_signature
    buffers = {
        name
        for name, buffer in signature.inputs_to_buffers.items()
        if buffer in signature.buffers_to_mutate.values()
    }
    puts = [node for node in ep.graph.nodes if node.target is _PUT]
    return all(_puts_whole_rows(n) and _is_last_reader(n, buffers) for n in puts)


def _puts_whole_rows(node: Node) -> bool:
    """Whether one row of the values is put at each place of one index."""
    args: Any = node.args
    whole, indices, values = args[:3]
    accumulates = args[3] if len(args) > 3 else node.kwargs.get("accumulate", False)
    dims = [i for i, index in enumerate(indices) if index is not None]
    if accumulates or len(dims) != 1 or indices[dims[0]].meta["val"].dim() != 1:
        return False
    expected = list(whole.meta["val"].shape)
    expected[dims[0]] = indices[dims[0]].meta["val"].shape[0]
    return [str(size) for size in expected] == [str(s) for s in values.meta["val"].shape]


def _is_last_reader(node: Node, buffers: set[str]) -> bool:
    """Whether nothing needs a buffer's former value once a node has put others into it."""
    whole: Any = node.args[0]
    if any(u.op == "output" or u.target in _VIEWS for u in whole.users if u is not node):
        return False
    return whole.name in buffers if whole.op == "placeholder" else whole.target is _PUT


def keep_contents(ep: ExportedProgram) -> None:
    """Mark the buffers that calls write and that are not empty, so that their values are stored.

    ExecuTorch stores no values of such buffers unless told to. Empty ones take no room in the
    file: zeros, and the least scales, which those of a quantized cache's empty rows are.
    """
    signature = ep.graph_signature
    written = set(signature.buffers_to_mutate.values())
    for node in ep.graph.nodes:
        name = signature.inputs_to_buffers.get(node.name) if node.op == "placeholder" else None
        held = ep.state_dict.get(name, ep.constants.get(name)) if name in written else None
        if isinstance(held, Tensor) and not _is_empty(held):
            node.meta["et_init_buffer"] = True


def _is_empty(value: Tensor) -> bool:
    if value.is_floating_point():
        return bool((value.abs() <= torch.finfo(value.dtype).tiny).all())
    return not value.any()
