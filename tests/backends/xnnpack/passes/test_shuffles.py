"""Pixels, channels and phases of upsamplings are permuted inside of the delegate."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.passes.data_movement import shuffles_as_permutations
from pt2e_quant.backends.xnnpack.passes.simplify import shuffle_depthwise
from tests.backends.call_saved import call_pte
from tests.call_function import Call

SHUFFLES = {
    "pixel_shuffle": (F.pixel_shuffle, lambda g: (2 * g * g, 3, 4)),
    "pixel_unshuffle": (F.pixel_unshuffle, lambda g: (2, 3 * g, 2 * g)),
    "channel_shuffle": (F.channel_shuffle, lambda g: (2 * g, 3, 4)),
}
UPSAMPLINGS = {
    "even": lambda: nn.ConvTranspose2d(8, 8, 4, 2, 1, groups=8),
    "odd": lambda: nn.ConvTranspose2d(8, 8, 3, 2, 1, 1, groups=8),
    "apart": lambda: nn.ConvTranspose2d(8, 8, 2, 2, groups=8),
    "one_axis": lambda: nn.ConvTranspose2d(8, 8, (1, 4), (1, 2), (0, 1), groups=8, bias=False),
}


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def names(gm):
    return {str(n.target) for n in gm.graph.nodes if n.op == "call_function"}


def quantized(function, x, *, is_quantized=True, **options):
    """A shuffle between q/dq of one scale."""
    qparams = (0.05, 3, -128, 127, torch.int8)
    qdq = torch.ops.quantized_decomposed

    def call(y):
        if not is_quantized:
            return function(y)
        y = qdq.dequantize_per_tensor(qdq.quantize_per_tensor(y, *qparams), *qparams)
        y = qdq.quantize_per_tensor(function(y), *qparams)
        return qdq.dequantize_per_tensor(y, *qparams)

    return torch.export.export(Call(call), (x,), **options).module()


@pytest.mark.parametrize("kind", SHUFFLES)
@given(factor=st.integers(1, 3), lead=st.sampled_from([(1,), (2,), (), (2, 3)]))
def test_shuffle_when_quantized_then_a_permutation_of_at_most_six_sizes(kind, factor, lead):
    function, sizes = SHUFFLES[kind]
    lead = (*lead, 1)[:1] if kind == "channel_shuffle" else lead  # it takes batches alone
    x = noise(*lead, *sizes(factor))
    gm = quantized(lambda y: function(y, factor), x)
    expected = gm(x)
    result = shuffles_as_permutations(gm)
    is_small = kind == "channel_shuffle" or len(lead) < 2
    assert result.changed is is_small
    assert (f"aten.{kind}.default" in names(gm)) is not is_small
    torch.testing.assert_close(gm(x), expected, rtol=0, atol=0)


def test_shuffle_when_height_and_width_are_dynamic_then_it_stays_and_says_why():
    x, sizes = noise(1, 8, 4, 5), {2: Dim("h", max=64), 3: Dim("w", max=64)}
    gm = quantized(lambda y: F.pixel_shuffle(y, 2), x, dynamic_shapes=(sizes,))
    result = shuffles_as_permutations(gm)
    assert not result.changed
    assert "one dynamic size" in result.notes[0].text


def test_shuffle_when_in_float_then_it_stays():
    gm = quantized(lambda y: F.pixel_shuffle(y, 2), noise(1, 8, 4, 5), is_quantized=False)
    assert not shuffles_as_permutations(gm).changed


@pytest.mark.parametrize("upsampling", UPSAMPLINGS)
def test_depthwise_upsampling_when_written_then_a_convolution_of_equal_values(upsampling):
    model, x = UPSAMPLINGS[upsampling](), noise(2, 8, 5, 6)
    gm = torch.export.export(model, (x,)).module()
    assert shuffle_depthwise(gm).changed
    assert "aten.conv_transpose2d.input" not in names(gm)
    torch.testing.assert_close(gm(x), model(x))


@pytest.mark.parametrize("groups", [1, 4])
def test_upsampling_when_a_group_sums_channels_then_it_stays_and_says_why(groups):
    gm = torch.export.export(
        nn.ConvTranspose2d(8, 8, 2, 2, groups=groups), (noise(1, 8, 4, 4),)
    ).module()
    result = shuffle_depthwise(gm)
    assert not result.changed
    assert "sum channels" in result.notes[0].text


class Upsamplings(nn.Module):
    """Shuffles and depthwise upsamplings between convolutions."""

    def __init__(self):
        super().__init__()
        self.before = nn.Conv2d(3, 8, 3, padding=1)
        self.made = nn.ModuleList(make() for make in UPSAMPLINGS.values())
        self.after = nn.ModuleList(nn.Conv2d(8, 4, 1) for _ in UPSAMPLINGS)
        self.last = nn.ModuleList(nn.Conv2d(channels, 4, 1) for channels in (2, 32, 8))

    def forward(self, x):
        y = F.relu(self.before(x))
        made = [after(F.relu(up(y))) for up, after in zip(self.made, self.after, strict=True)]
        shuffled = (F.pixel_shuffle(y, 2), F.pixel_unshuffle(y, 2), F.channel_shuffle(y, 4))
        return made + [conv(one) for conv, one in zip(self.last, shuffled, strict=True)]


@pytest.mark.parametrize("dynamic", ["batch", "image"])
def test_shuffles_when_lowered_then_in_integers_and_right_at_each_size(tmp_path, dynamic):
    torch.manual_seed(0)
    model = Upsamplings().eval()
    data = [(noise(2, 3, 10, 12, seed=seed),) for seed in range(2)]
    is_batch = dynamic == "batch"
    image = {2: 2 * Dim("h", min=2, max=12), 3: 2 * Dim("w", min=2, max=12)}
    artifact = pq.quantize(
        model,
        data[0],
        dynamic_shapes={"x": {0: Dim("batch", min=1, max=8)} if is_batch else image},
        calibration_data=data,
        backend="xnnpack",
        progress=False,
    )
    assert "ConvTranspose2d" not in artifact.report.float_ops
    if is_batch:
        assert not artifact.contents().overloads
    shapes = [(1, 10, 12), (5, 10, 12), (2, 10, 12)] if is_batch else [(2, 4, 20), (2, 24, 6)]
    calls = [(noise(n, 3, h, w, seed=h),) for n, h, w in shapes]
    again = call_pte(artifact, calls, tmp_path)
    for x, elsewhere in zip(calls, again, strict=True):
        found = artifact.run(*x)
        torch.testing.assert_close(elsewhere, found, rtol=0, atol=0)
        for expected, made in zip(artifact.quantized(*x), found, strict=True):
            assert pq.sqnr_db([expected], [made]) > 35
