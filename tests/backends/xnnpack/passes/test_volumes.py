"""Operators of volumes lower as operators of images, convolutions of them in integers."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.passes.volumes import volumes_as_images, volumes_in_integers
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.graph.pipeline import run_passes

CONVS = {
    "plain": nn.Conv3d(2, 4, 3),
    "strided": nn.Conv3d(4, 6, (3, 3, 2), stride=(2, 1, 2), padding=(1, 1, 0), groups=2),
    "dilated": nn.Conv3d(3, 4, (2, 3, 3), dilation=(2, 1, 1), padding=1, bias=False),
    "flat": nn.Conv3d(3, 4, (1, 3, 3)),
    "same": nn.Conv3d(2, 8, 3, padding="same"),
    "same, even": nn.Conv3d(2, 8, (2, 4, 3), padding="same", dilation=(3, 1, 2)),
    "valid": nn.Conv3d(2, 8, 3, padding="valid"),
    "transposed": nn.ConvTranspose3d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
    "transposed, dilated": nn.ConvTranspose3d(
        2, 3, (2, 3, 1), stride=(1, 2, 1), padding=(0, 1, 0), dilation=(2, 1, 1), bias=False
    ),
    "transposed, flat": nn.ConvTranspose3d(2, 3, (1, 2, 2), stride=(3, 2, 2)),
}
POOLS = {
    "max": nn.MaxPool3d(2),
    "max, every argument": nn.MaxPool3d((3, 2, 3), (2, 1, 2), 1, (1, 2, 1), ceil_mode=True),
    "average": nn.AvgPool3d((3, 2, 3), 2, (1, 1, 0), ceil_mode=True),
    "average without padding": nn.AvgPool3d((3, 2, 3), 2, (1, 1, 0), count_include_pad=False),
    "average with a divisor": nn.AvgPool3d(3, 2, 1, divisor_override=5),
    "adaptive average": nn.AdaptiveAvgPool3d((2, 3, 1)),
    "adaptive max": nn.AdaptiveMaxPool3d((2, 3, 2)),
}
OPERATORS = {**CONVS, **POOLS}
DEEP = ({0: Dim("batch", min=1, max=8), 2: Dim("depth", min=4, max=32)},)
WIDE = ({3: Dim("height", min=4, max=32), 4: Dim("width", min=4, max=32)},)


def written(model: nn.Module, x: Tensor, shapes=None):
    gm = torch.export.export(model.eval(), (x,), dynamic_shapes=shapes).module()
    (record,) = run_passes(gm, (volumes_as_images,))
    return gm, record


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("is_batched", [True, False])
@pytest.mark.parametrize("what", OPERATORS)
@torch.no_grad()
def test_volumes_as_images_when_written_then_the_values_are_the_same(what, is_batched, make_noise):
    model = OPERATORS[what]
    x = make_noise((*(2,) * is_batched, getattr(model, "in_channels", 4), 7, 8, 9))
    gm, _ = written(model, x)
    assert not any("3d" in str(n.target) for n in gm.graph.nodes)
    torch.testing.assert_close(gm(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("shapes", [DEEP, WIDE])
@pytest.mark.parametrize(
    "what", [*CONVS, "max", "adaptive max", "average with a divisor", "adaptive average"]
)
@torch.no_grad()
def test_volumes_as_images_when_sizes_are_dynamic_then_right_at_others(what, shapes, make_noise):
    model = OPERATORS[what]
    channels = getattr(model, "in_channels", 4)
    gm, _ = written(model, make_noise((2, channels, 7, 8, 9)), shapes)
    assert not any("3d" in str(n.target) for n in gm.graph.nodes)
    sizes = (3, channels, 11, 8, 9) if shapes is DEEP else (2, channels, 7, 11, 5)
    x = make_noise(sizes, 1)
    torch.testing.assert_close(gm(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("model", [nn.Conv3d(3, 4, 1), nn.ConvTranspose3d(3, 2, 2)], ids=str)
@torch.no_grad()
def test_volumes_as_images_when_torch_asks_for_the_sample_s_depth_then_right_at_others(
    model, make_noise
):
    # With one thread and a kernel of one place, torch asks for 16 images or more: two volumes of a
    # depth of at most 8 have them at 8 alone.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = make_noise((2, model.in_channels, 8, 5, 8))
        gm, _ = written(model, x, ({2: Dim("depth", max=8)},))
    finally:
        torch.set_num_threads(threads)
    for depth in (8, 6, 3):
        x = make_noise((2, model.in_channels, depth, 5, 8), depth)
        torch.testing.assert_close(gm(x), model(x), atol=1e-5, rtol=1e-5)


def test_volumes_as_images_when_run_again_then_nothing_changes(make_noise):
    gm, record = written(CONVS["strided"], make_noise((2, 4, 7, 8, 9)))
    assert [note.node for note in record.notes] == ["conv3d"]
    assert not run_passes(gm, (volumes_as_images,))[0].notes


def test_conv3d_when_written_then_its_weight_is_a_constant_of_the_same_memory(make_noise):
    model = CONVS["plain"]
    gm, _ = written(model, make_noise((2, 2, 7, 8, 9)))
    (conv,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.conv2d.default)
    held = gm.get_buffer(conv.args[1].target)
    assert conv.args[1].op == "get_attr"
    assert held.data_ptr() == gm.get_parameter("weight").data_ptr()


class Clips(nn.Module):
    """Every kind of operator, one behind the other, and a weight that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.up = nn.Conv3d(2, 4, 3, padding=1), nn.ConvTranspose3d(4, 2, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool3d(torch.relu(self.first(x)), 2)
        h = F.avg_pool3d(self.up(h), 2)
        return F.conv3d(h, torch.sigmoid(self.first.weight[:3, :, 0:1]), padding=(0, 1, 1))


@pytest.mark.parametrize("shapes", [None, DEEP])
def test_lower_when_a_model_is_of_volumes_then_int8_and_right(make_noise, shapes):
    model = Clips().eval()
    batches = [make_noise((2, 2, 8, 10, 10), seed) for seed in range(2)]
    artifact = pq.quantize(
        model,
        (batches[0],),
        dynamic_shapes=shapes,
        calibration_data=batches,
        backend="xnnpack",
        progress=False,
        strict=False,
    )
    assert artifact.report.integer_ops["Conv2d"] >= 1
    found, wanted = artifact.run(batches[1]), model(batches[1])
    assert found.shape == wanted.shape
    assert (found - wanted).norm() < 0.1 * wanted.norm()


def test_lower_when_another_quantizer_made_the_graph_then_its_volumes_are_written(
    every_row, quantize_with, make_noise
):
    x = make_noise((1, 2, 5, 6, 6))
    gm = quantize_with(nn.Sequential(CONVS["plain"], nn.Sigmoid()), (x,), every_row())
    assert any(n.target is torch.ops.aten.conv3d.default for n in gm.graph.nodes)
    artifact = BACKEND.lower(gm)
    torch.testing.assert_close(artifact.run(x), gm(x), atol=1 / 256, rtol=0)


INT8 = pq.QuantizationSpec(
    dtype=torch.int8,
    observer_or_fake_quant_ctr=pq.MinMaxObserver,
    quant_min=-128,
    quant_max=127,
    qscheme=torch.per_tensor_affine,
)
ROWS = pq.QuantizationSpec(
    dtype=torch.int8,
    observer_or_fake_quant_ctr=pq.PerChannelMinMaxObserver,
    quant_min=-127,
    quant_max=127,
    qscheme=torch.per_channel_symmetric,
    ch_axis=0,
)


class EachConv(pq.Quantizer):
    """Quantizes convolutions of volumes as they stand, as ExecuTorch's XNNPACKQuantizer does.

    Args:
        result: whether the result is quantized too, behind a clip where one follows.
    """

    def __init__(self, *, result: bool = True) -> None:
        self.result = result

    def annotate(self, gm):
        for conv in [n for n in gm.graph.nodes if n.target is torch.ops.aten.conv3d.default]:
            (reader, *_) = conv.users
            last = reader if "relu" in reader.name else conv
            inputs = {conv.args[0]: INT8, conv.args[1]: ROWS}
            for node, specs, out in ((conv, inputs, last is conv), (last, {}, last is not conv)):
                if specs or out:
                    node.meta["quantization_annotation"] = pq.QuantizationAnnotation(
                        input_qspec_map=specs,
                        output_qspec=INT8 if out and self.result else None,
                        _annotated=True,
                    )

    def validate(self, gm):
        pass


class Annotated(nn.Module):
    """Padding, strides, dilation, groups, with a clip behind them and without one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = CONVS["strided"], CONVS["dilated"]
        self.between = nn.Conv3d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(torch.relu(self.first(x))))


@pytest.mark.parametrize("dynamic", [False, True])
def test_lower_when_another_quantizer_annotates_conv3d_then_in_integers(
    quantize_with, make_noise, dynamic
):
    x = make_noise((2, 4, 7, 8, 9))
    gm = quantize_with(Annotated(), (x,), EachConv(), dynamic=dynamic)
    artifact = BACKEND.lower(gm)
    assert artifact.report.integer_ops == {"Conv2d": 3}
    assert artifact.report.float_regions == []
    for batch in (2, 1, 4) if dynamic else (2,):
        other = make_noise((batch, 4, 7, 8, 9), batch)
        # A value on a tie is a step of 256 away.
        assert pq.sqnr_db(gm(other), artifact.run(other)) > 40


def test_volumes_in_integers_when_run_again_then_nothing_changes(quantize_with, make_noise):
    gm = quantize_with(Annotated(), (make_noise((2, 4, 7, 8, 9)),), EachConv())
    (record,) = run_passes(gm, (volumes_in_integers,))
    assert [n.node for n in record.notes] == ["conv3d", "conv3d_1", "conv3d_2"]
    assert not run_passes(gm, (volumes_in_integers,))[0].notes


def test_lower_when_a_conv3d_cannot_be_integer_then_its_own_node_is_named(
    quantize_with, make_noise
):
    x = make_noise((2, 4, 7, 8, 9))
    gm = quantize_with(nn.Sequential(CONVS["strided"], nn.Tanh()), (x,), EachConv(result=False))
    with pytest.raises(UnsupportedError, match="cannot keep conv3d quantized") as caught:
        BACKEND.lower(gm)
    assert (caught.value.node_name, "module  0" in str(caught.value)) == ("conv3d", True)
    artifact = BACKEND.lower(gm, strict=False)
    assert {"conv3d"} <= {region.node for region in artifact.report.float_regions}
