"""Pads with values of their input run in integers inside of the delegate."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.passes.data_movement import edges_as_slices
from pt2e_quant.graph.pipeline import run_passes
from tests.backends.call_saved import call_pte
from tests.call_function import Call

MODES = ("reflect", "replicate", "circular")


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def written(function, x):
    gm = torch.export.export(Call(function), (x,)).module()
    return gm, run_passes(gm, (edges_as_slices,))[0]


@given(st.sampled_from(MODES), st.data())
@settings(max_examples=60, deadline=None)
def test_pad_when_written_as_slices_then_equal(mode, data):
    sizes = data.draw(st.lists(st.integers(9, 12), min_size=1, max_size=3))
    pads = data.draw(st.lists(st.integers(0, 8), min_size=2 * len(sizes), max_size=2 * len(sizes)))
    x = noise(1, 2, *sizes)
    gm, record = written(lambda x: F.pad(x, pads, mode=mode) + 0, x)
    assert record.changed
    assert all("pad" not in str(node.target) for node in gm.graph.nodes)
    assert torch.equal(gm(x), F.pad(x, pads, mode=mode))


@pytest.mark.parametrize("pads", [(9, 0, 0, 0), (-1, 0, 0, 1)], ids=["wide", "cropping"])
def test_pad_when_wide_or_cropping_then_left(pads):
    assert not written(lambda x: F.pad(x, pads, mode="replicate"), noise(1, 2, 10, 10))[1].changed


class Padded(nn.Module):
    """Convolutions that pad with values of their input, in one, two and three axes."""

    def __init__(self, axes):
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        self.layers = nn.Sequential(
            conv(3, 6, 3, padding=1, padding_mode="reflect"),
            nn.ReLU(),
            conv(6, 6, 7, padding=3, padding_mode="replicate", groups=6),
            nn.ReLU(),
            conv(6, 4, 5, padding=2, padding_mode="circular"),
        )

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_pad_when_lowered_then_in_integers_in_the_delegate(axes, tmp_path):
    torch.manual_seed(0)
    sizes = (2, 3, *(8, 9, 10)[:axes])
    data = [(noise(*sizes, seed=seed),) for seed in range(3)]
    artifact = pq.quantize(
        Padded(axes).eval(),
        data[0],
        calibration_data=data,
        backend="xnnpack",
        progress=False,
        effort="fast",
    )
    assert not [r for r in artifact.report.float_regions if "pad" in r.node]
    if axes < 3:  # views between images and volumes are outside
        assert not artifact.contents().overloads
    again = call_pte(artifact, data, tmp_path)
    for x, elsewhere in zip(data, again, strict=True):
        assert torch.equal(artifact.run(*x), elsewhere)


def test_pad_when_the_batch_is_dynamic_then_each_image_is_padded_as_alone():
    torch.manual_seed(0)
    x = noise(2, 3, 8, 9)
    artifact = pq.quantize(
        Padded(2).eval(),
        (x,),
        dynamic_shapes={"x": {0: Dim("batch", max=8)}},
        calibration_data=[(x,)],
        backend="xnnpack",
        progress=False,
        effort="fast",
    )
    batch = noise(5, 3, 8, 9, seed=1)
    alone = torch.cat([artifact.run(image) for image in batch.split(1)])
    assert torch.equal(artifact.run(batch), alone)
