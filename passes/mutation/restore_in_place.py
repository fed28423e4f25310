"""Write activations in place again where the model did and nothing else can see it."""

from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2e_quant.graph.alias import aliased_argument
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import aten, is_in_place, out_of_place
from pt2e_quant.graph.pipeline import PassResult, graph_pass
from pt2e_quant.passes.mutation.functionalize_activations import (
    WAS_IN_PLACE,
    no_activation_writes,
)


@graph_pass(needs=(), gives=(), ends=(no_activation_writes,))
def restore_in_place(gm: GraphModule) -> PassResult:
    """Undo `functionalize_activations` for operators whose input is a fresh result of no other use.

    Before:  y = relu(conv2d(x, w))         where the model has relu_
    After:   y = relu_(conv2d(x, w))
    """
    editor = Editor(gm)
    marked = [node for node in gm.graph.nodes if node.meta.get(WAS_IN_PLACE)]
    editor.changed = any([_restored(node) for node in marked])  # a list: all of them
    return PassResult(changed=editor.finish())


def _restored(node: Node) -> bool:
    """Give a node its in-place operator again; returns whether that is safe."""
    target = in_place(node.target)
    written = node.args[0] if node.args else None
    if target is None or not isinstance(written, Node) or written.op != "call_function":
        return False
    if len(written.users) > 1 or aliased_argument(written) is not None:
        return False
    before, after = written.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    if before.dtype != after.dtype or before.shape != after.shape:
        return False
    node.target = target
    return True


def in_place(target: object) -> Any:
    """The in-place form of an operator, None if it has none of the same overload.

    >>> in_place(aten.relu.default)
    <OpOverload(op='aten.relu_', overload='default')>
    """
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return None
    packet = getattr(aten, f"{target._schema.name.rpartition('::')[2]}_", None)
    found = getattr(packet, target._overloadname, None)
    is_form = isinstance(found, OpOverload) and is_in_place(found)
    return found if is_form and out_of_place(found) is target else None
