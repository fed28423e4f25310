"""A quantized program as a torch module of fused kernels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.backends.artifact import Artifact, write_artifact
from pt2e_quant.backends.cuda.move_to_device import move_to_device
from pt2e_quant.backends.profile import Profile, profile
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import InputError
from pt2e_quant.flow.reexport import export_again
from pt2e_quant.flow.report import Report

__all__ = ["CudaArtifact"]


class CudaArtifact(Artifact):
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
        super().__init__(capture, report)
        self.module = module
        self.data = data
        self.device = _device_of(module)
        self._call: Any = module
        self._initial = {n: module.get_buffer(n).clone() for n in capture.mutated_buffers}

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
        self._initial = {n: value.to(wanted) for n, value in self._initial.items()}
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

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """Run a call operator by operator, with what each moved, computed and took.

        The times are of the module as it runs without `compile` and without a CUDA graph.

        Raises:
            InputError: the inputs do not fit the captured graph.
        """
        leaves = self.capture.bind(args, kwargs)
        found = profile(self.module, self.capture.positional(leaves))
        self.reset()
        return found

    def reset(self) -> None:
        """Forget what earlier calls wrote into buffers."""
        with torch.no_grad():
            for name, value in self._initial.items():
                self.module.get_buffer(name).copy_(value)

    def save(self, path: str | Path) -> None:
        """Write the file: a temporary name beside it first, then renamed.

        Raises:
            ArtifactError: the path cannot be written.
        """
        write_artifact(path, self.data)

    @property
    def size_bytes(self) -> int:
        """Bytes of the file that `save` writes."""
        return len(self.data)


def _device_of(module: GraphModule) -> torch.device:
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")
