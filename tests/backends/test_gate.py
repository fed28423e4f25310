"""The gate hands out what agrees with the canonical graph, and nothing else."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import export

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.gate import FLOOR_DB, check_artifact
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.provenance import Provenance
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.report import Report
from pt2e_quant.flow.sample import Sample


class Noisy(Artifact):
    """The graph's own result with relative noise on top."""

    def __init__(self, gm: Any, noise: float) -> None:
        super().__init__(capture_of(gm), Report(backend="test", provenance=Provenance()))
        self.gm = gm
        self.noise = noise

    def run_leaves(self, leaves: Sequence[Any]) -> Sequence[Any]:
        with torch.no_grad():
            out = self.gm(*leaves)
        generator = torch.Generator().manual_seed(0)
        return [out + self.noise * out.std() * torch.randn(out.shape, generator=generator)]

    def save(self, path: str | Path) -> None:
        raise AssertionError("not saved here")

    @property
    def size_bytes(self) -> int:
        return 0


@pytest.fixture
def gm():
    torch.manual_seed(0)
    return export(nn.Linear(16, 64).eval(), (torch.randn(4, 16),)).module()


def _sample(gm: Any, float_noise: float | None) -> Sample:
    x = torch.randn(4, 16)
    if float_noise is None:
        return Sample(leaves=(x,), float_outputs=None)
    out = gm(x).detach()
    return Sample(leaves=(x,), float_outputs=(out + float_noise * torch.randn_like(out),))


def test_faithful_artifact_passes_and_both_ratios_are_reported(gm):
    artifact = Noisy(gm, noise=1e-3)
    check_artifact(artifact, gm, _sample(gm, 0.05), margin_db=6.0)
    assert artifact.report.sqnr_canonical_db > 55
    assert 15 < artifact.report.sqnr_float_db < 30


def test_artifact_no_nearer_than_float_is_refused(gm):
    with pytest.raises(ArtifactError, match="differs from the canonical graph"):
        check_artifact(Noisy(gm, noise=0.1), gm, _sample(gm, 0.05), margin_db=6.0)


def test_lower_margin_accepts_what_a_higher_one_refuses(gm):
    artifact, sample = Noisy(gm, noise=0.05), _sample(gm, 0.05)
    check_artifact(artifact, gm, sample, margin_db=-10.0)
    with pytest.raises(ArtifactError):
        check_artifact(artifact, gm, sample, margin_db=6.0)


def test_without_float_result_the_floor_decides(gm):
    sample = _sample(gm, None)
    check_artifact(Noisy(gm, noise=10 ** (-(FLOOR_DB + 3) / 20)), gm, sample, margin_db=6.0)
    with pytest.raises(ArtifactError, match=f"at least {FLOOR_DB:.1f} dB"):
        check_artifact(Noisy(gm, noise=10 ** (-(FLOOR_DB - 3) / 20)), gm, sample, margin_db=6.0)


def test_nan_is_refused(gm):
    with pytest.raises(ArtifactError, match="SQNR nan"):
        check_artifact(Noisy(gm, noise=float("nan")), gm, _sample(gm, 0.05), margin_db=6.0)
