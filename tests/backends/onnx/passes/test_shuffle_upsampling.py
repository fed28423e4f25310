"""Upsampling by transposed convolution: exact as a convolution, and then in integers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.backends.onnx.passes.shuffle_upsampling import shuffle_upsampling


def captured(model: nn.Module, x: Tensor) -> Any:
    return torch.export.export(model.eval(), (x,)).module()


def names(gm: Any) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("factor", [2, 3])
def test_upsampling_when_windows_do_not_overlap_then_it_is_a_convolution(
    factor: int, bias: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 6, 5, 4)
    gm = captured(nn.ConvTranspose2d(6, 4, factor, factor, bias=bias), x)
    expected, before = gm(x), {k: v.clone() for k, v in gm.state_dict().items()}
    assert shuffle_upsampling(gm).changed
    assert "aten.conv2d.default" in names(gm)
    assert not any("conv_transpose" in name for name in names(gm))
    torch.testing.assert_close(gm(x), expected, rtol=1e-5, atol=1e-6)
    after = gm.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items() if k in after)
    assert not shuffle_upsampling(gm).changed


@pytest.mark.parametrize(
    "model",
    [
        nn.ConvTranspose2d(6, 4, 3, 2),
        nn.ConvTranspose2d(6, 4, 2, 2, padding=1),
        nn.ConvTranspose2d(6, 4, 2, 2, groups=2),
        nn.ConvTranspose2d(6, 4, 2, 2, dilation=2),
        nn.ConvTranspose2d(6, 4, (2, 3), (2, 3)),
    ],
)
def test_upsampling_when_windows_overlap_or_are_cut_then_it_declines(model: nn.Module) -> None:
    gm = captured(model, torch.randn(2, 6, 5, 4))
    result = shuffle_upsampling(gm)
    assert not result.changed
    assert "overlap" in result.notes[0].text


def test_upsampling_when_lowered_then_it_runs_in_integers() -> None:
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 8, 2, 2),
        nn.ReLU(),
        nn.Conv2d(8, 2, 1),
    )
    x = torch.randn(2, 3, 6, 6)
    backend = pq.backends.get("onnx")
    prepared = pq.prepare_pt2e(torch.export.export(model.eval(), (x,)), backend.quantizer())
    pq.calibrate(prepared, [(x,)], progress=False)
    quantized = pq.convert_pt2e(prepared)
    artifact = backend.lower(quantized)
    assert artifact.report.integer_ops["QLinearConv"] == 3
    assert artifact.report.float_ops == {}
    assert pq.sqnr_db(model(x), artifact.run(x)) > 30
