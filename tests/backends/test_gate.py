"""The gate hands out what agrees with the canonical graph, and nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import export
from torch.fx import GraphModule

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.gate import FLOAT_CEILING_DB, FLOOR_DB, check_artifact
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.flow.calibrate.sample import Sample


@pytest.fixture
def noisy(artifact_of) -> Callable[[GraphModule, float], Artifact]:
    """Makes an artifact of a graph's own result with relative noise on top."""

    def make(gm: GraphModule, noise: float) -> Artifact:
        def call(*leaves: Any) -> Tensor:
            out = gm(*leaves)
            generator = torch.Generator().manual_seed(0)
            return out + noise * out.std() * torch.randn(out.shape, generator=generator)

        return artifact_of(gm, call)

    return make


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


def test_gate_when_an_artifact_is_faithful_then_passes_and_reports_both_ratios(gm, noisy):
    artifact = noisy(gm, 1e-3)
    check_artifact(artifact, gm, _sample(gm, 0.05), margin_db=6.0)
    assert artifact.report.sqnr_canonical_db > 55
    assert 15 < artifact.report.sqnr_float_db < 30


def test_gate_when_an_artifact_is_no_nearer_than_float_then_refuses_it(gm, noisy):
    with pytest.raises(ArtifactError, match="differs from the canonical graph"):
        check_artifact(noisy(gm, 0.1), gm, _sample(gm, 0.05), margin_db=6.0)


def test_gate_when_the_margin_is_lower_then_accepts_what_a_higher_one_refuses(gm, noisy):
    artifact, sample = noisy(gm, 0.05), _sample(gm, 0.05)
    check_artifact(artifact, gm, sample, margin_db=-10.0)
    with pytest.raises(ArtifactError):
        check_artifact(artifact, gm, sample, margin_db=6.0)


def test_gate_when_there_is_no_float_result_then_the_floor_decides(gm, noisy):
    sample = _sample(gm, None)
    check_artifact(noisy(gm, 10 ** (-(FLOOR_DB + 3) / 20)), gm, sample, margin_db=6.0)
    with pytest.raises(ArtifactError, match=f"at least {FLOOR_DB:.1f} dB"):
        check_artifact(noisy(gm, 10 ** (-(FLOOR_DB - 3) / 20)), gm, sample, margin_db=6.0)


def test_gate_when_results_are_nan_then_refuses_the_artifact(gm, noisy):
    with pytest.raises(ArtifactError, match="SQNR nan"):
        check_artifact(noisy(gm, float("nan")), gm, _sample(gm, 0.05), margin_db=6.0)


def test_gate_when_quantization_does_not_reach_a_result_then_asks_for_more(gm, noisy):
    check_artifact(noisy(gm, 1e-4), gm, _sample(gm, 0.0), margin_db=6.0)
    with pytest.raises(ArtifactError, match=f"at least {FLOAT_CEILING_DB:.1f} dB"):
        check_artifact(noisy(gm, 1e-2), gm, _sample(gm, 0.0), margin_db=6.0)
    check_artifact(noisy(gm, 1e-2), gm, _sample(gm, 0.0), margin_db=-25.0)
