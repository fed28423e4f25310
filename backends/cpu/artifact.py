"""A quantized program as a torch module of oneDNN's fused operators."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.backends.artifact import Artifact, write_artifact
from pt2e_quant.core.capture import Capture
from pt2e_quant.flow.report import Report

__all__ = ["CpuArtifact"]


class CpuArtifact(Artifact):
    """Fused operators on weights packed for this machine.

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
        self._initial = {n: module.get_buffer(n).clone() for n in capture.mutated_buffers}

    def run_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run on the call's leaves; buffers that a call writes keep their values."""
        with torch.no_grad():
            result = self.module(*self.capture.positional(leaves))
        found: list[Any] = pytree.tree_leaves(result, is_leaf=lambda value: value is None)
        return found

    def reset(self) -> None:
        """Forget what earlier calls wrote into buffers."""
        with torch.no_grad():
            for name, value in self._initial.items():
                self.module.get_buffer(name).copy_(value)

    def save(self, path: str | Path) -> None:
        """Write the .qpt2: a temporary file beside it first, then renamed.

        Raises:
            ArtifactError: the path cannot be written.
        """
        write_artifact(path, self.data)

    @property
    def size_bytes(self) -> int:
        """Bytes of the .qpt2."""
        return len(self.data)
