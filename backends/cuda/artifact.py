"""A quantized program as a torch module of fused kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.backends.cuda.passes.move_to_device import move_to_device
from pt2e_quant.backends.module_artifact import ModuleArtifact
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import InputError
from pt2e_quant.flow.reexport import export_again
from pt2e_quant.flow.report.report import Report


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
