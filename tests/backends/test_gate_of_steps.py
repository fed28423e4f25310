"""A quantized result of few steps is right where few values are a step off, and none more."""

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter

import pt2e_quant as pq
from pt2e_quant.backends.gate import check_artifact, choose_sample
from pt2e_quant.backends.judge_results import ROUNDED_SHARE
from pt2e_quant.core.errors import ArtifactError

ROWS = 64


class _Scaled(nn.Module):
    """Calibrated with a row 12 times as large as others, which are few quantization steps."""

    def __init__(self, end) -> None:
        super().__init__()
        self.end = end
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.linear(x)).reshape(-1, 4, 4)


@pytest.fixture(
    params=[nn.Identity(), nn.Tanh(), nn.LeakyReLU(0.5)], ids=["as is", "tanh", "leaky"]
)
def graph(request, plain_backend):
    torch.manual_seed(0)
    model = _Scaled(request.param).eval()
    batches = [(torch.randn(ROWS, 16),) for _ in range(2)]
    batches[1][0][0] *= 12
    prepared = pq.prepare_pt2e(torch.export.export(model, batches[0]), plain_backend.quantizer())
    pq.calibrate(prepared, batches, progress=False)
    return pq.convert_pt2e(prepared)


class _Stepped(Interpreter):
    """Moves a share of one value's elements."""

    def __init__(self, gm, place, share, by) -> None:
        super().__init__(gm)
        self.place, self.share, self.by = place, share, by

    def run_node(self, n):
        value = super().run_node(n)
        if n is not self.place:
            return value
        places = torch.arange(value.numel()).reshape(value.shape)
        return value + (places % 100 < 100 * self.share) * self.by


def _check(gm, artifact_of, share, steps):
    """The gate's verdict where a share of the result's values is so many steps off."""
    last = [n for n in gm.graph.nodes if "dequantize_per_tensor" in str(n.target)][-1]

    def call(x):
        return _Stepped(gm, last, share, steps * last.args[1]).run(x, enable_io_processing=False)

    artifact = artifact_of(gm, call)
    check_artifact(artifact, gm, choose_sample(gm, None), margin_db=6.0)
    return artifact.report


def test_gate_when_few_values_are_one_step_off_then_accepted_with_a_note(graph, artifact_of):
    report = _check(graph, artifact_of, ROUNDED_SHARE - 0.05, 1)
    assert report.sqnr_canonical_db < 35
    assert any("a step from the graph's" in note for note in report.notes)


@pytest.mark.parametrize(("share", "steps"), [(ROUNDED_SHARE + 0.05, 1), (1.0, 1), (0.2, 2)])
def test_gate_when_more_values_or_more_steps_are_off_then_refused(graph, artifact_of, share, steps):
    with pytest.raises(ArtifactError, match="SQNR"):
        _check(graph, artifact_of, share, steps)
