"""The artifact of backends whose program is a torch module: buffers, files, profiles."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.backends.artifact import Artifact, write_artifact
from pt2e_quant.backends.fuse_kernels import KERNEL_KEY
from pt2e_quant.backends.profile import Profile
from pt2e_quant.backends.profile_module import profile_module
from pt2e_quant.backends.program_file import with_figures
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.flow.report.report import Report


class ModuleArtifact(Artifact):
    """A lowered program as a torch module.

    Args:
        module: the lowered graph; call it as the float module.
        data: the bytes that `save` writes.
        capture: the call it was captured with.
        report: what became of every tensor.
    """

    def __init__(self, module: GraphModule, data: bytes, capture: Capture, report: Report) -> None:
        super().__init__(capture, report)
        self.module = module
        self.data = data
        self.initial = {n: module.get_buffer(n).clone() for n in capture.mutated_buffers}
        """Buffers that a call writes, as they were at first."""

    def run_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        """Run on the call's leaves; buffers that a call writes keep their values."""
        with torch.no_grad():
            result = self.module(*self.capture.positional(leaves))
        found: list[Any] = pytree.tree_leaves(result, is_leaf=lambda value: value is None)
        return found

    def float_operators(self, gm: GraphModule) -> frozenset[str]:
        """The nodes that the module computes in float, by operators of torch as the graph has."""
        own = {n.name: n for n in self.module.graph.nodes if KERNEL_KEY not in n.meta}
        kept = (n for n in gm.graph.nodes if n.name in own and own[n.name].target == n.target)
        found = {n.name for n in kept if n.op == "call_function" and not is_qdq(n)}
        return super().float_operators(gm) | found

    def time_operators(self, leaves: Sequence[Any]) -> Profile:
        """Time the module operator by operator, without `compile` and without a CUDA graph."""
        return profile_module(
            self.module, self.capture.positional(leaves), runtime=self.report.backend
        )

    def reset(self) -> None:
        """Restore the buffers that earlier calls wrote."""
        with torch.no_grad():
            for name, value in self.initial.items():
                self.module.get_buffer(name).copy_(value)

    def state(self) -> Mapping[str, Tensor]:
        """The buffers that calls write, as the module holds them."""
        return {name: self.module.get_buffer(name) for name in self.initial}

    def keep_figures(self) -> None:
        """Add the results of the check to the file."""
        self.data = with_figures(self.data, self.report)
        self.report.size_bytes = len(self.data)

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
