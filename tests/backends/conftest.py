"""An artifact that is any function of a call's leaves."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.core.provenance import Provenance
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.report.report import Report


class CallArtifact(Artifact):
    def __init__(self, gm: GraphModule, call: Callable[..., Any]) -> None:
        super().__init__(capture_of(gm), Report(backend="test", provenance=Provenance()))
        self.call = call

    def run_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        with torch.no_grad():
            return pytree.tree_leaves(self.call(*leaves))

    def reset(self) -> None:
        """A function keeps nothing."""

    def state(self) -> Mapping[str, Any]:
        return {}

    def save(self, path: str | Path) -> None:
        raise AssertionError("not saved here")

    @property
    def size_bytes(self) -> int:
        return 0


@pytest.fixture
def artifact_of() -> type[CallArtifact]:
    """Makes an artifact of a graph's capture and a function of its leaves."""
    return CallArtifact
