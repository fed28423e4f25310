"""A quantized program as a torch module of fused kernels, and its move to a device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.backends.module_artifact import ModuleArtifact
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import InputError
from pt2e_quant.flow.reexport import export_again
from pt2e_quant.flow.report.report import Report
from pt2e_quant.graph.ops import parameters


class CudaArtifact(ModuleArtifact):
    """Fused operators on weights laid out for the kernels.

    It is made on the device that the quantized graph lies on; `to("cuda")` moves it. On CPU
    tensors every fused operator runs its definition in plain torch: slow, and exact.

    Args:
        module: the fused graph; call it as the float module.
        data: the bytes that `save` writes.
        capture: the call it was captured with.
        report: what became of every tensor.
    """

    def __init__(self, module: GraphModule, data: bytes, capture: Capture, report: Report) -> None:
        super().__init__(module, data, capture, report)
        self.device = _device_of(module)
        self._call: Any = module

    def to(self, device: torch.device | str) -> "CudaArtifact":
        """Move the module, and what it makes, to a device; returns the artifact itself.

        Raises:
            InputError: torch sees no such device.
        """
        wanted = torch.device(device)
        if wanted.type == "cuda" and not torch.cuda.is_available():
            raise InputError(
                f"torch sees no GPU to move the program to {wanted}",
                fix="run it where there is one; here it runs on the CPU, each fused operator by "
                "its definition",
            )
        move_to_device(self.module, wanted)
        self.initial = {n: value.to(wanted) for n, value in self.initial.items()}
        self.device = wanted
        return self

    def compile(self, **options: Any) -> "CudaArtifact":
        """Let `torch.compile` fuse what was left in float around the kernels.

        Args:
            options: of torch.compile.

        Returns:
            The artifact itself; `run` calls the compiled module.
        """
        self._call = torch.compile(self.module, **options)
        return self

    def exported_program(self) -> ExportedProgram:
        """The fused graph with the captured dynamic shapes: for torch.export.save, AOTInductor."""
        return export_again(self.module)

    def run_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run on the call's leaves; buffers that a call writes keep their values.

        Raises:
            InputError: a tensor lies on another device than the module.
        """
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.device.type != self.device.type:
                raise InputError(
                    f"the program is on {self.device}, an input on {leaf.device}",
                    fix=f'artifact.to("{leaf.device.type}"), or move the inputs',
                )
        with torch.no_grad():
            result = self._call(*self.capture.positional(leaves))
        found: list[Any] = pytree.tree_leaves(result, is_leaf=lambda value: value is None)
        return found


def _device_of(module: GraphModule) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")


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
