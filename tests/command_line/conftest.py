import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim, export, save


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """model.pt2 (batch of any size), one.pt2 (batch 1) and data.npz, in the working folder."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    shapes = ({0: Dim("b", min=1, max=64)},)
    save(export(model, (torch.randn(4, 4),), dynamic_shapes=shapes), tmp_path / "model.pt2")
    save(export(model, (torch.randn(1, 4),)), tmp_path / "one.pt2")
    x = np.random.default_rng(0).standard_normal((12, 4), dtype=np.float32)
    np.savez(tmp_path / "data.npz", input=x, labels=np.arange(12))
    monkeypatch.chdir(tmp_path)
    return tmp_path
