"""Copies that change nothing, removed before the graph is partitioned.

A copy between two operators of the delegate cuts it in two. In ExecuTorch's graphs every tensor
is contiguous, so a clone that only changes strides and an expand to the same shape do nothing.
"""

from executorch.exir.dialects._ops import ops as exir_ops
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

_COPIES = frozenset(
    {
        exir_ops.edge.aten.clone.default,
        exir_ops.edge.aten.expand_copy.default,
        exir_ops.edge.aten.alias_copy.default,
        exir_ops.edge.dim_order_ops._clone_dim_order.default,
        exir_ops.edge.dim_order_ops._to_dim_order_copy.default,
    }
)


def remove_noop_copies(gm: GraphModule) -> PassResult:
    """Let the readers of a copy read its input where shape, dtype and dim order are the same."""
    changed = False
    for node in list(gm.graph.nodes):
        if node.target in _COPIES and _is_noop(node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
            changed = True
    if changed:
        gm.recompile()
    return PassResult(gm, changed)


def _is_noop(node: Node) -> bool:
    source = node.args[0]
    # An output must not be an input of the program.
    if not isinstance(source, Node) or (
        source.op != "call_function" and any(u.op == "output" for u in node.users)
    ):
        return False
    before, after = source.meta.get("val"), node.meta.get("val")
    return (
        isinstance(before, Tensor)
        and isinstance(after, Tensor)
        and before.dtype == after.dtype
        and str(before.shape) == str(after.shape)
        and before.dim_order() == after.dim_order()
    )
