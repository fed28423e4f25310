"""Batch norms without a convolution before them become depthwise convolutions in integers."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.graph.op_table import KEEP_FLOAT_KEY
from pt2e_quant.graph.ops import aten
from pt2e_quant.passes.batch_norm.affines_as_convs import affines_as_convs
from pt2e_quant.passes.batch_norm.fold_batch_norm import fold_batch_norm
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants

IMAGE = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))
SIGNAL = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(3))


class Before(nn.Module):
    """A norm and a relu before the convolution (He et al. 2016, Identity mappings)."""

    def __init__(self, channels=4):
        super().__init__()
        torch.manual_seed(0)
        self.bn, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x):
        return self.conv(torch.relu(self.bn(x)))


def test_affines_as_convs_when_a_norm_has_no_conv_then_it_is_a_depthwise_conv(program, settled):
    p = program(settled(Before(), IMAGE), (IMAGE,))
    p.apply(fold_batch_norm, affines_as_convs, drop_dead_constants)
    p.shows(
        """
        x: f32[2, 4, 6, 6] = input
        conv2d: f32[2, 4, 6, 6] = conv2d(x, bn.weight, bias=bn.bias, groups=4)
        relu: f32[2, 4, 6, 6] = relu(conv2d)
        conv2d_1: f32[2, 3, 6, 6] = conv2d(relu, conv.weight, bias=conv.bias, padding=[1, 1])
        return (conv2d_1)
        """
    )
    p.matches((IMAGE * 2,)).leaves_model_alone().is_idempotent(affines_as_convs)


class Affine(nn.Module):
    def __init__(self, scale, shift=None):
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("shift", shift)

    def forward(self, x):
        y = self.scale * x
        return torch.relu(y if self.shift is None else self.shift + y)


PER_CHANNEL = torch.tensor([0.5, -2.0, 0.0, 3.0])


@pytest.mark.parametrize(
    ("scale", "shift", "x"),
    [
        (PER_CHANNEL.view(1, 4, 1, 1), PER_CHANNEL.view(4, 1, 1), IMAGE),
        (PER_CHANNEL.view(4, 1, 1), None, IMAGE),
        (PER_CHANNEL.view(4, 1), PER_CHANNEL.view(4, 1), SIGNAL),
        (PER_CHANNEL.view(4, 1, 1), torch.tensor(1.0), IMAGE),
    ],
)
def test_affines_as_convs_when_written_as_product_and_sum_then_a_conv(program, scale, shift, x):
    p = program(Affine(scale, shift), (x,))
    p.apply(affines_as_convs)
    assert aten.mul.Tensor not in {n.target for n in p.gm.graph.nodes}
    p.matches((x * 3,)).leaves_model_alone().is_idempotent(affines_as_convs)


@pytest.mark.parametrize(
    ("scale", "x"),
    [
        (torch.tensor(2.0), IMAGE),
        (torch.ones(6), IMAGE),
        (torch.ones(2, 4, 1, 1), IMAGE),
        (torch.ones(4), torch.ones(3, 4)),
        (torch.ones(4, 1, 1), torch.ones(4, 6, 6)),
        (torch.ones(4, 1, 1), IMAGE.double()),
        (torch.ones(4), torch.ones(1)),
    ],
    ids=["number", "column", "per image", "matrix", "no batch", "promoted", "stretched"],
)
def test_affines_as_convs_when_not_a_value_for_each_channel_then_left(program, scale, x):
    p = program(Affine(scale), (x,))
    p.apply(affines_as_convs)
    assert "aten.mul.Tensor" in p.targets()


def test_affines_as_convs_when_the_operator_stays_float_then_left_with_the_reason(program):
    p = program(Affine(PER_CHANNEL.view(4, 1, 1)), (IMAGE,))
    for node in p.gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
        node.meta[KEEP_FLOAT_KEY] = "light", "read_in_float"
    p.apply(affines_as_convs)
    assert p.skips == ["it stays float"]


@pytest.mark.parametrize("backend", ["xnnpack", "onnx"])
def test_affines_as_convs_when_channels_differ_widely_then_nearer_to_float(backend, settled):
    generator = torch.Generator().manual_seed(5)
    spread = torch.logspace(-1, 0, 32).view(32, 1, 1)
    images = torch.randn(4, 32, 8, 8, generator=generator) * spread
    model = settled(Before(32), images)
    program = torch.export.export(model, (images,))
    found = {}
    for is_conv in (True, False):
        quantizer = pq.backends.get(backend).quantizer("int8")
        passes = quantizer.transforms
        quantizer.transforms = tuple(p for p in passes if is_conv or p is not affines_as_convs)
        prepared = pq.prepare_pt2e(program, quantizer)
        gm = pq.convert_pt2e(pq.calibrate(prepared, [(images,)], progress=False))
        targets = [n.target for n in gm.graph.nodes]
        assert (aten.mul.Tensor in targets) is not is_conv
        found[is_conv] = pq.sqnr_db(model(images), gm(images))
    assert found[True] > found[False] + 2
