"""A small program, the file it is saved in, and a way to forge such files."""

import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.fx import GraphModule

from pt2e_quant.core.provenance import PROVENANCE_KEY, Provenance
from pt2e_quant.flow.archive.layout import PROGRAM, VERSION
from pt2e_quant.flow.archive.program import save
from pt2e_quant.flow.archive.read_files import read_program
from pt2e_quant.passes.cleanup.strip_guards import strip_guards


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


@pytest.fixture
def own(small_file: Path, tmp_path: Path) -> Path:
    """A copy to forge."""
    path = tmp_path / "own.ptq"
    path.write_bytes(small_file.read_bytes())
    return path


@pytest.fixture(scope="session")
def rewrite() -> Callable[..., None]:
    return _rewrite


def _rewrite(path: Path, change: Callable[[dict[str, Any]], None], **metadata: str) -> None:
    """A file of its own, checksums and all, of a changed program: what an attacker can write."""
    with path.open("rb") as stream:
        held = read_program(path, stream)
    outer = {
        "version": VERSION,
        "parts": {n: [p.dtype, p.shape, p.sha256, p.shard] for n, p in held.parts.items()},
        "shards": list(held.shards),
        "program": held.value,
    }
    change(outer)
    packed = zlib.compress(json.dumps(outer).encode())
    tensors = load_file(path) | {PROGRAM: torch.frombuffer(bytearray(packed), dtype=torch.uint8)}
    digest = hashlib.sha256(packed).hexdigest()
    save_file(
        tensors,
        path,
        {"format": "pt2e_quant", "version": str(VERSION), "sha256": digest} | metadata,
    )
