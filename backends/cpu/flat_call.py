"""A lowered module as one function of the call's leaves, for programs whose operators are short."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from pt2e_quant.graph.meta import attribute


def flat_call(module: GraphModule) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What a module computes, from its leaves in placeholder order to the leaves of its result.

    The module's own call takes the user's containers apart and puts them together again, and
    looks every constant up through the modules that hold it: a fifth of a call of a network of
    tiny layers. Here the constants are attributes of one object. They are the module's own
    tensors, so that what a call writes into a buffer is seen in the module.

    Args:
        module: is not changed.
    """
    names: dict[Any, Any] = {}
    graph = torch.fx.Graph()
    result: Any = graph.graph_copy(module.graph, names)
    graph.output(tuple(pytree.tree_leaves(result, is_leaf=lambda value: value is None)))
    graph.set_codegen(CodeGen())
    flat = GraphModule(torch.nn.Module(), torch.fx.Graph())
    for node in graph.nodes:
        if node.op in ("get_attr", "call_module"):
            held = attribute(module, node.target)
            node.target = f"held_{node.name}"
            # Not through Module.__setattr__: what is registered is looked up in three tables.
            flat.__dict__[node.target] = held
    flat.graph = graph
    # Opaque to torch.compile as the module is.
    forward = torch.compiler.disable(flat.forward)  # type: ignore[no-untyped-call]  # torch's own

    def call(leaves: Sequence[Any]) -> Sequence[Any]:
        if not torch.is_grad_enabled():
            return forward(*leaves)  # type: ignore[no-any-return]  # generated code
        # A tenth of the time of `with torch.no_grad()`, which counts beside a tiny network's.
        torch._C._set_grad_enabled(False)
        try:
            return forward(*leaves)  # type: ignore[no-any-return]
        finally:
            torch._C._set_grad_enabled(True)

    return call
