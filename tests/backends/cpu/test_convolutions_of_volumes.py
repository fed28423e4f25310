"""Convolutions of volumes in oneDNN's integers, held to the q/dq graph."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends import get
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e

pytestmark = pytest.mark.usefixtures("unmeasured")

CPU = get("cpu")


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def quantized(model, x, dynamic_shapes=None):
    program = torch.export.export(model.eval(), (x,), dynamic_shapes=dynamic_shapes)
    prepared = prepare_pt2e(program, CPU.quantizer("int8"))
    calibrate(prepared, [(x,)], progress=False)
    return convert_pt2e(prepared)


def fused(artifact):
    return artifact.report.integer_ops.get("onednn.qconv_pointwise", 0)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16),
    kernel=st.tuples(*[st.integers(1, 3)] * 3),
    stride=st.tuples(*[st.integers(1, 2)] * 3),
    padding=st.tuples(*[st.integers(0, 1)] * 3),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 1, 2]),
    ending=st.sampled_from(["none", "relu", "conv", "relu, conv"]),
    has_bias=st.booleans(),
)
def test_volume_when_drawn_then_as_the_graph_says(
    seed, kernel, stride, padding, dilation, groups, ending, has_bias
):
    assume(all(pad <= dilation * (taps - 1) for pad, taps in zip(padding, kernel, strict=True)))
    torch.manual_seed(seed)
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    layers = [nn.Conv3d(4, 6, kernel, bias=has_bias, **geometry)]
    layers += [nn.ReLU()] if "relu" in ending else []
    layers += [nn.Conv3d(6, 2, 1)] if "conv" in ending else []
    x = noise(2, 4, 6, 7, 8, seed=seed)
    gm = quantized(nn.Sequential(*layers), x)
    artifact = CPU.lower(gm)
    assert fused(artifact) == 1 + ("conv" in ending)
    with torch.no_grad():
        expected, found = gm(x), artifact.run(x)
    # An input between two integers, and sums between two, may be rounded the other way.
    assert found.shape == expected.shape
    assert pq.sqnr_db([expected], [found]) > 45


@pytest.mark.parametrize("is_shifted", [False, True])
def test_relu_when_onednn_has_no_post_op_for_it_then_cuts_off_all_the_same(is_shifted):
    """The value behind the relu has the zero point of a cat's other part, or zero."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Conv3d(4, 4, 3, padding=1), nn.Conv3d(4, 4, 1)
            self.c = nn.Conv3d(8 if is_shifted else 4, 2, 1)

        def forward(self, x):
            found = torch.relu(self.a(x))
            return self.c(torch.cat([found, self.b(x)], 1) if is_shifted else found)

    x = noise(1, 4, 5, 6, 7)
    gm = quantized(Net(), x)
    artifact = CPU.lower(gm)
    assert fused(artifact) == 2 + is_shifted
    with torch.no_grad():
        assert pq.sqnr_db([gm(x)], [artifact.run(x)]) > 45


def test_depthwise_volume_when_quantized_then_stays_float_with_the_reason():
    model = nn.Sequential(nn.Conv3d(4, 4, 3), nn.ReLU(), nn.Conv3d(4, 4, 3, groups=4))
    artifact = CPU.lower(quantized(model, noise(1, 4, 6, 7, 8)))
    assert fused(artifact) == 1
    assert "no depthwise convolution" in str(artifact.report)


def test_volumes_when_saved_then_the_file_takes_every_size(tmp_path):
    model = nn.Sequential(
        nn.Conv3d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(8, 4, (1, 3, 3), padding="same"),
    ).eval()
    sizes = [(2, 1, 6, 10, 12), (3, 1, 9, 8, 15)]
    shapes = {"input": dict.fromkeys((0, 2, 3, 4), torch.export.Dim.AUTO)}
    program = torch.export.export(model, (noise(*sizes[0]),), dynamic_shapes=shapes)
    data = [noise(*sizes[0], seed=seed) for seed in range(8)]
    artifact = pq.quantize(program, calibration_data=data, backend="cpu", progress=False)
    assert fused(artifact) == 2
    artifact.save(tmp_path / "volumes.qpt2")
    loaded = CPU.load(tmp_path / "volumes.qpt2")
    for shape in sizes + sizes:
        x = noise(*shape, seed=9)
        with torch.no_grad():
            assert pq.sqnr_db([model(x)], [artifact.run(x)]) > 30
        torch.testing.assert_close(loaded.run(x), artifact.run(x))
