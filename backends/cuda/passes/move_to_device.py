"""A graph module on another device: its tensors, and the tensors that its calls make."""

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.graph.ops import parameters


def move_to_device(gm: GraphModule, device: torch.device) -> None:
    """Move a graph module in place; `aten.arange(…, device=cpu)` becomes one on the device.

    Args:
        gm: its constants are replaced, not written: a user's module may share them.
        device: where to.
    """
    for module in gm.modules():
        _move_constants(module, device)
    for node in gm.graph.nodes:
        _move_call(node, device)
        value = node.meta.get("val")
        if value is not None:
            node.meta["val"] = pytree.tree_map_only(Tensor, lambda t: t.to(device), value)
    recompile(gm)


def _move_constants(module: nn.Module, device: torch.device) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        moved = nn.Parameter(parameter.detach().to(device), requires_grad=False)
        module.register_parameter(name, moved)
    for name, buffer in module.named_buffers(recurse=False):
        # Assigned, not registered: whether a buffer is saved stays as it was.
        setattr(module, name, buffer.to(device))
    for name, value in list(vars(module).items()):
        if isinstance(value, Tensor):
            setattr(module, name, value.to(device))


def _move_call(node: Node, device: torch.device) -> None:
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return
    if node.kwargs.get("device") is not None:
        node.update_kwarg("device", device)
        return
    places = {p.name: i for i, p in enumerate(parameters(node.target)) if not p.kwarg_only}
    place = places.get("device")
    if place is not None and place < len(node.args):
        node.update_arg(place, device)
