"""Transposed convolutions: exact as convolutions, in integers where that is no slower."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.backends.onnx.passes import shuffle_upsampling as module
from pt2e_quant.backends.onnx.passes.shuffle_upsampling import shuffle_upsampling

_KINDS = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d}


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ratio is known, as on a CPU that no benchmark has run on."""
    monkeypatch.setattr(module, "ratio_here", lambda node, backend: None)


def captured(model: nn.Module, x: Tensor, **options: Any) -> Any:
    return torch.export.export(model.eval(), (x,), **options).module()


def names(gm: Any) -> list[str]:
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


@st.composite
def transposed(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A transposed convolution that cuts off no more than it adds, and an input."""
    rank = draw(st.sampled_from((1, 2)))
    axes = st.tuples(*[st.integers(1, 4)] * rank)
    kernel, stride = draw(axes), draw(axes)
    dilation = draw(st.tuples(*[st.integers(1, 2)] * rank))
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    padding = [draw(st.integers(0, r)) for r in reach]
    more = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    groups, bias = draw(st.sampled_from((1, 2))), draw(st.booleans())
    made = _KINDS[rank](4, 6, kernel, stride, padding, more, groups, bias, dilation)
    sizes = draw(st.tuples(*[st.integers(5, 8)] * rank))
    return made, torch.randn(2, 4, *sizes)


@given(transposed())
def test_upsampling_when_written_as_convolution_then_equal_and_weights_are_kept(
    drawn: tuple[nn.Module, Tensor],
) -> None:
    model, x = drawn
    gm = captured(model, x)
    before = {k: v.clone() for k, v in gm.state_dict().items()}
    expected = gm(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "ratio_here", lambda node, backend: None)
        result = shuffle_upsampling(gm)
    # A cut that no padding undoes is the only reason to decline.
    assert result.changed or "cuts off" in result.notes[0].text
    assert result.changed is not any("conv_transpose" in name for name in names(gm))
    torch.testing.assert_close(gm(x), expected, rtol=1e-4, atol=1e-5)
    after = gm.state_dict()
    assert all(torch.equal(after[k], v) for k, v in before.items() if k in after)
    assert not shuffle_upsampling(gm).changed


@pytest.mark.parametrize(
    "sizes", [(2, 2, 0, 0), (3, 2, 1, 1), (4, 2, 1, 0), (5, 2, 2, 1), (16, 8, 4, 0), (3, 1, 1, 0)]
)
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.usefixtures("unmeasured")
def test_upsampling_when_of_a_usual_size_then_it_does_not_decline(
    sizes: tuple[int, ...], rank: int
) -> None:
    x = torch.randn(2, 3, *[6, 5][:rank])
    gm = captured(_KINDS[rank](3, 4, *sizes), x)
    expected = gm(x)
    assert shuffle_upsampling(gm).changed
    torch.testing.assert_close(gm(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("unmeasured")
def test_upsampling_when_sizes_are_dynamic_then_it_runs_at_others() -> None:
    model = nn.ConvTranspose2d(3, 4, 4, (2, 1), 1)
    sizes = {0: torch.export.Dim("n", max=8), 2: torch.export.Dim("h", min=2, max=64)}
    gm = captured(model, torch.randn(2, 3, 6, 5), dynamic_shapes=(sizes,))
    assert shuffle_upsampling(gm).changed
    for x in (torch.randn(1, 3, 9, 5), torch.randn(5, 3, 2, 5)):
        torch.testing.assert_close(gm(x), model(x), rtol=1e-4, atol=1e-5)


def test_upsampling_when_it_measured_slower_then_it_stays_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ratio_here", lambda node, backend: 0.5)
    gm = captured(nn.ConvTranspose2d(6, 4, 2, 2), torch.randn(2, 6, 5, 4))
    result = shuffle_upsampling(gm)
    assert not result.changed
    assert "0.50 times as fast" in result.notes[0].text


def decoder(kernel: int, padding: int) -> nn.Module:
    """A small decoder with batch norm and relu behind its transposed convolution."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
    up = (nn.ConvTranspose2d(16, 16, kernel, 2, padding), nn.BatchNorm2d(16), nn.ReLU())
    model = nn.Sequential(*layers, *up, nn.Conv2d(16, 2, 1))
    model(torch.randn(8, 3, 8, 8))  # in training: statistics of data
    return model.eval()


@pytest.mark.parametrize(("kernel", "padding"), [(2, 0), (4, 1)])
@pytest.mark.usefixtures("unmeasured")
def test_upsampling_when_lowered_then_it_runs_in_integers(kernel: int, padding: int) -> None:
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    model, x = decoder(kernel, padding), torch.randn(2, 3, 6, 6)
    backend = pq.backends.get("onnx")
    prepared = pq.prepare_pt2e(torch.export.export(model, (x,)), backend.quantizer())
    pq.calibrate(prepared, [(x,)], progress=False)
    artifact = backend.lower(pq.convert_pt2e(prepared), allow_slower=True)
    assert artifact.report.integer_ops["QLinearConv"] == 3
    assert artifact.report.float_ops == {}
    assert pq.sqnr_db(model(x), artifact.run(x)) > 30


def test_upsampling_when_left_in_float_then_its_weight_is_int8_in_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    monkeypatch.setattr(module, "ratio_here", lambda node, backend: 0.5)
    model, x = decoder(4, 1), torch.randn(2, 3, 6, 6)
    artifact = pq.quantize(model, (x,), backend="onnx", calibration_data=[(x,)], progress=False)
    sizes = {s.name: s.dtype for s in pq.provenance_of(artifact.quantized).sizes}
    assert sizes["2.weight"] == "int8"
    assert artifact.report.float_ops["ConvTranspose"] == 1
    assert pq.sqnr_db(model(x), artifact.run(x)) > 30


def test_upsampling_when_slower_is_allowed_then_it_is_a_convolution_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    monkeypatch.setattr(module, "ratio_here", lambda node, backend: 0.5)
    exported = torch.export.export(decoder(4, 1), (torch.randn(2, 3, 6, 6),))
    for is_allowed in (False, True):
        quantizer = pq.backends.get("onnx").quantizer()
        quantizer = quantizer.allowing("slower") if is_allowed else quantizer
        found = names(pq.prepare_pt2e(exported, quantizer))
        assert any("conv_transpose" in name for name in found) is not is_allowed
