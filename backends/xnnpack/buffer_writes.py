"""The buffers that a graph writes: in place where ExecuTorch can, and what they hold at first."""

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pt2e_quant.graph.ops import argument, aten, is_call

__all__ = ["keep_contents", "writes_whole_rows"]

_INDEX_PUT = (aten.index_put.default, aten.index_put_.default)


def writes_whole_rows(gm: GraphModule) -> bool:
    """Whether every value that is put at indices has the dimensions of what it is put into.

    ExecuTorch 1.4's in-place index_put looks up the indexed dimension in the values without
    broadcasting them first, and fails at run time where they have fewer.
    """
    return all(
        _dims(argument(node, "values")) == _dims(argument(node, "self"))
        for node in gm.graph.nodes
        if is_call(node, _INDEX_PUT)
    )


def _dims(node: object) -> int:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dim() if isinstance(value, Tensor) else -1


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
