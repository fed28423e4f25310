"""Operators on images that the delegate takes for any batch; ExecuTorch asks for a fixed one."""

import pytest
import torch
from torch import nn
from torch.export import Dim

import pt2e_quant as pq
from benchmarks.measure import sqnr_db

BETWEEN = {
    "bilinear": nn.Upsample(scale_factor=2.0, mode="bilinear"),
    "bilinear, corners aligned": nn.Upsample(size=(9, 5), mode="bilinear", align_corners=True),
    "max pool, rounded up": nn.MaxPool2d(3, 2, ceil_mode=True),
    "max pool, rounded up behind padding": nn.MaxPool2d(3, 2, 1, ceil_mode=True),
}


def lowered(between, shapes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), between, nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(2, 3, 8, 9)
    backend = pq.backends.get("xnnpack").allowing_slower()
    return pq.quantize(
        model,
        (x,),
        dynamic_shapes=(shapes,),
        calibration_data=[(x,), (torch.randn(2, 3, 8, 9),)],
        backend=backend,
        progress=False,
    )


def is_as_its_graph(artifact, x):
    with torch.no_grad():
        expected = artifact.quantized(x)
    found = artifact.run(x)
    return expected.shape == found.shape and sqnr_db([expected], [found]) > 30


@pytest.mark.parametrize("name", BETWEEN)
def test_operator_when_the_batch_is_dynamic_then_in_the_delegate_and_right(name):
    artifact = lowered(BETWEEN[name], {0: Dim("batch", min=1, max=8)})
    assert not artifact.contents().kernels
    assert len(artifact.contents().delegates) == 1
    for batch in (2, 8, 1, 5):
        x = torch.randn(batch, 3, 8, 9, generator=torch.Generator().manual_seed(batch))
        assert is_as_its_graph(artifact, x)


def test_resize_when_the_height_is_dynamic_then_outside_of_the_delegate_and_right():
    artifact = lowered(BETWEEN["bilinear"], {2: Dim("height", min=6, max=16)})
    assert "aten.upsample_bilinear2d" in artifact.contents().kernels
    for height in (8, 16, 6, 11):
        x = torch.randn(2, 3, height, 9, generator=torch.Generator().manual_seed(height))
        assert is_as_its_graph(artifact, x)
