"""Whether the buffer writes of a graph are such that ExecuTorch can do them in place."""

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.ops import argument, aten, is_call

__all__ = ["writes_whole_rows"]

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
