"""A runtime that refuses or miscomputes one operator: the rest is lowered, and it runs in float.

The faults are ExecuTorch's and XNNPACK's own: what keeps the lowering from them is taken away.
"""

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.backends.target.float_retries import Fallback, mark_fallback
from pt2e_quant.backends.xnnpack import partition
from pt2e_quant.backends.xnnpack import partition as delegate_limits
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.passes import delegated_functions, refloat
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.flow.calibrate.sample import sqnr_db


def quantized(model: nn.Module, x: Tensor, **options):
    return pq.quantize(
        model.eval(), (x,), calibration_data=[x], backend="xnnpack", progress=False, **options
    )


@pytest.mark.parametrize(
    ("make", "shape", "name"),
    [
        (lambda: nn.Linear(3, 4, bias=False), (5, 3), "linear"),
        (lambda: nn.Conv1d(3, 4, 3, bias=False), (2, 3, 6), "conv1d"),
        (lambda: nn.Conv2d(3, 4, 3, bias=False), (2, 3, 6, 6), "conv2d"),
        (lambda: nn.ConvTranspose2d(3, 4, 3, bias=False), (2, 3, 6, 6), "conv_transpose2d"),
    ],
)
def test_layer_when_the_runtime_does_not_load_it_then_float_with_the_reason(
    monkeypatch, make_noise, make, shape, name
):
    monkeypatch.setattr(refloat, "why_no_product", lambda *_: None)
    x = 4e5 * make_noise(shape)
    model = nn.Sequential(make()).eval()
    nn.init.zeros_(model[0].weight)
    # A linear alone would take the scale of its input at run time, and be loaded.
    artifact = quantized(model, x, recipe="int8_minmax")
    assert torch.equal(artifact.run(x), model(x))
    (region,) = artifact.report.float_regions
    assert (region.node, region.what) == (name, "runs in float")
    assert region.reason.startswith("in integers it is refused: ExecuTorch cannot take this graph")


def test_layer_when_left_then_the_one_before_it_stays_integer(monkeypatch, make_noise):
    monkeypatch.setattr(refloat, "why_no_product", lambda *_: None)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1))
    nn.init.zeros_(model[1].weight)
    nn.init.constant_(model[1].bias, 1e-6)
    artifact = quantized(model, 4e5 * make_noise((2, 3, 8, 8)))
    first, behind = artifact.report.float_regions
    assert first.node in ("conv2d_1", "relu")
    # In steps of the tiny values that it reads, int32 does not hold the bias of the last.
    assert behind.node == "conv2d_2"
    assert artifact.report.integer_ops["Conv2d"] == 1


class Sum(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


def test_operator_when_the_check_convicts_its_integers_then_float_in_the_delegate(
    monkeypatch, every_row, quantize_with, make_noise
):
    monkeypatch.setattr(partition, "why_beyond_scales", lambda *_: None)
    x = make_noise((2, 4, 6, 6))
    y = -x + 1e-7 * make_noise((2, 4, 6, 6), 1)
    gm = quantize_with(Sum(), (x, y), every_row())
    artifact = BACKEND.lower(gm)
    (region,) = artifact.report.float_regions
    assert (region.node, region.what) == ("add", "runs in float")
    assert "differs from the canonical graph" in region.reason
    assert artifact.report.float_ops == {"Add": 1}
    assert sqnr_db(gm(x, y), artifact.run(x, y)) > 60


class Scaled(nn.Module):
    """An ELU with a scale, which the delegate leaves out, behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten.elu(self.conv(x), 1.0, 2.0)


def test_operator_when_its_float_form_is_wrong_too_then_outside_of_the_delegate(
    monkeypatch, make_noise
):
    monkeypatch.setitem(delegate_limits._HOLDS, "elu.default", lambda _: True)
    x = 4 * make_noise((2, 3, 8, 8))
    artifact = quantized(Scaled(), x)
    (region,) = artifact.report.float_regions
    assert (region.node, region.what) == ("elu", "runs in float, with plain operators")
    assert artifact.contents().kernels["aten.elu"] == 1


def test_function_when_its_form_is_wrong_then_outside_of_the_delegate(monkeypatch, make_noise):
    monkeypatch.setitem(delegated_functions._FORMS, "aten.mish.default", torch.tanh)
    artifact = quantized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Mish()), make_noise((2, 3, 8, 8)))
    (region,) = artifact.report.float_regions
    assert (region.node, region.what) == ("mish", "runs in float, with plain operators")


def test_operator_when_leaving_it_does_not_help_then_the_first_refusal(monkeypatch, make_noise):
    def stop(*_):
        raise RuntimeError("stopped")

    monkeypatch.setattr("pt2e_quant.backends.xnnpack.lower.load_program", stop)
    with pytest.raises(UnsupportedError, match="RuntimeError: stopped") as caught:
        quantized(nn.Sequential(nn.Linear(4, 4)), make_noise((3, 4)))
    assert caught.value.node_name == "linear"


def test_linear_of_run_time_scales_when_left_then_no_second_reason_under_strict(make_noise):
    x = make_noise((3, 4))
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    prepared = pq.prepare_pt2e(torch.export.export(model, (x,)), BACKEND.quantizer("int8"))
    pq.calibrate(prepared, [x], progress=False)
    gm = pq.convert_pt2e(prepared)
    (linear,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.linear.default)
    assert linear.args[0].name.startswith("dequantize_per_token")
    mark_fallback(linear, Fallback.FLOAT)
    artifact = BACKEND.lower(gm, strict=True)
    assert artifact.report.integer_ops == {}
    assert sqnr_db(model(x), artifact.run(x)) > 40
