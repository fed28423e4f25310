"""SiLU of dequantized integers is one operator of ONNX Runtime."""

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import pt2e_quant as pq
from pt2e_quant.backends.artifact import Artifact

BACKEND = pq.backends.get("onnx").allowing_slower()


class Gated(nn.Module):
    """A SiLU, or the gate of another value, between convolutions in integers."""

    def __init__(self, *, is_silu: bool) -> None:
        super().__init__()
        self.first, self.gate, self.last = (nn.Conv2d(4, 4, 1) for _ in range(3))
        self.is_silu = is_silu

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        made = nn.functional.silu(y) if self.is_silu else y * self.gate(x).tanh().sigmoid()
        return self.last(made)  # type: ignore[no-any-return]


def lowered(*, is_silu: bool = True, portable: bool = False) -> tuple[Artifact, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 5)
    program = torch.export.export(Gated(is_silu=is_silu).eval(), (x,))
    prepared = pq.prepare_pt2e(program, BACKEND.quantizer("int8"))
    gm = pq.convert_pt2e(pq.calibrate(prepared, [(x,)], progress=False))
    artifact = BACKEND.lower(gm, portable=portable)
    return artifact, artifact.run(x), gm(x)


def test_silu_when_it_reads_integers_then_it_is_one_operator() -> None:
    artifact, found, expected = lowered()
    assert artifact.report.float_ops.get("QuickGelu") == 1
    assert "Sigmoid" not in artifact.report.float_ops
    assert pq.sqnr_db(expected, found) > 40


def test_silu_when_the_file_is_portable_then_the_standard_alone() -> None:
    artifact, found, expected = lowered(portable=True)
    assert b"com.microsoft" not in artifact.model  # type: ignore[attr-defined]
    assert pq.sqnr_db(expected, found) > 40


def test_gate_when_it_is_of_another_value_then_it_is_kept() -> None:
    artifact, found, expected = lowered(is_silu=False)
    assert "QuickGelu" not in artifact.report.float_ops
    assert pq.sqnr_db(expected, found) > 40
