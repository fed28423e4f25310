"""Convolutions of volumes lower as convolutions of images, in integers."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.passes.volumes import conv3d_as_conv2d
from pt2e_quant.graph.ops import CONV3D, is_call
from pt2e_quant.graph.pipeline import run_passes

CONVS = {
    "plain": nn.Conv3d(2, 4, 3),
    "strided": nn.Conv3d(4, 6, (3, 3, 2), stride=(2, 1, 2), padding=(1, 1, 0), groups=2),
    "dilated": nn.Conv3d(3, 4, (2, 3, 3), dilation=(2, 1, 1), padding=1, bias=False),
    "flat": nn.Conv3d(3, 4, (1, 3, 3)),
    "same": nn.Conv3d(2, 8, 3, padding="same"),
    "same, even": nn.Conv3d(2, 8, (2, 4, 3), padding="same", dilation=(3, 1, 2)),
    "valid": nn.Conv3d(2, 8, 3, padding="valid"),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("batch", [(2,), ()], ids=["batch", "one"])
@pytest.mark.parametrize("what", CONVS)
@torch.no_grad()
def test_conv3d_as_conv2d_when_written_then_the_values_are_the_same(what, batch, make_noise):
    conv = CONVS[what].eval()
    x = make_noise((*batch, conv.in_channels, 7, 8, 9))
    gm = torch.export.export(conv, (x,)).module()
    run_passes(gm, (conv3d_as_conv2d,))
    assert not any(is_call(n, CONV3D) for n in gm.graph.nodes)
    torch.testing.assert_close(gm(x), conv(x), atol=1e-5, rtol=1e-5)


def test_conv3d_when_sizes_are_dynamic_then_left(make_noise):
    sizes = ({2: torch.export.Dim("depth", min=4, max=16)},)
    x = make_noise((1, 2, 7, 8, 9))
    gm = torch.export.export(CONVS["plain"].eval(), (x,), dynamic_shapes=sizes).module()
    (record,) = run_passes(gm, (conv3d_as_conv2d,))
    assert not record.notes


def test_lower_when_a_model_convolves_clips_then_int8_and_right(make_noise):
    model = nn.Sequential(nn.Conv3d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 4, 3, stride=2))
    batches = [make_noise((2, 3, 7, 10, 10), seed) for seed in range(2)]
    artifact = pq.quantize(
        model.eval(),
        (batches[0],),
        calibration_data=batches,
        backend="xnnpack",
        progress=False,
    )
    assert artifact.report.integer_ops["Conv2d"] == 2
    found, wanted = artifact.run(batches[1]), model(batches[1])
    assert found.shape == wanted.shape
    assert (found - wanted).norm() < 0.1 * wanted.norm()
