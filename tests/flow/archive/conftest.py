"""A small converted program, and the file it is saved in."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from pt2e_quant.core.provenance import PROVENANCE_KEY, Provenance
from pt2e_quant.flow.archive.program import save
from pt2e_quant.passes.strip_guards import strip_guards


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.b(torch.relu(self.a(x)))}


@pytest.fixture(scope="session")
def small() -> GraphModule:
    torch.manual_seed(0)
    dims = {"x": {0: torch.export.Dim("n", min=2, max=9)}}
    program = torch.export.export(Plain().eval(), (torch.ones(2, 3),), dynamic_shapes=dims)
    gm = program.module()
    strip_guards(gm)
    gm.meta[PROVENANCE_KEY] = Provenance(quantizer="none")
    return gm


@pytest.fixture(scope="session")
def small_file(small: GraphModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("archive") / "small.ptq"
    save(small, path)
    return path
