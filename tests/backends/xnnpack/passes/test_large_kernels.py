"""Depthwise convolutions with large kernels are sums of smaller ones."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from pt2e_quant.backends.xnnpack.passes.large_kernels import split_large_kernels
from pt2e_quant.graph.ops import CONV1D, CONV2D, is_call
from pt2e_quant.graph.pipeline import run_passes
from tests.backends.call_saved import call_pte, pte_of_batches


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def written(conv, x):
    """The graph of a convolution after the pass, and the taps of its convolutions."""
    gm = torch.export.export(conv.eval(), (x,)).module()
    run_passes(gm, (split_large_kernels,))
    convs = [n for n in gm.graph.nodes if is_call(n, CONV1D + CONV2D)]
    return gm, [n.args[1].meta["val"][0].numel() for n in convs]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_kernel_when_split_then_equal_to_rounding(data):
    rank = data.draw(st.integers(1, 2))
    kernel = data.draw(
        st.lists(st.integers(1, 13 if rank == 2 else 49), min_size=rank, max_size=rank)
    )
    stride = data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
    dilation = data.draw(st.lists(st.integers(1, 2), min_size=rank, max_size=rank))
    padding = [
        (k - 1) * d // 2 + data.draw(st.integers(-2, 3))
        for k, d in zip(kernel, dilation, strict=True)
    ]
    assume(min(padding) >= 0)
    torch.manual_seed(0)
    kind = (nn.Conv1d, nn.Conv2d)[rank - 1]
    bias = data.draw(st.booleans())
    conv = kind(3, 3, kernel, stride, padding, dilation, groups=3, bias=bias)
    x = noise(2, 3, *((k - 1) * d + 3 for k, d in zip(kernel, dilation, strict=True)))
    gm, taps = written(conv, x)
    assert max(taps) <= 25 or len(taps) == 1
    torch.testing.assert_close(gm(x), conv(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "taps"),
    [
        (5, [25]),
        (6, [24, 12]),
        (7, [21, 14, 14]),
        (9, [9, 18, 18, 18, 18]),
        ((3, 9), [18, 9]),
        ((31, 1), [16, 15]),
        (13, [169]),
        ((101, 1), [101]),
    ],
)
def test_kernel_when_larger_than_xnnpack_s_then_few_parts(kernel, taps):
    kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
    conv = nn.Conv2d(2, 2, kernel, padding=tuple(k // 2 for k in kernel), groups=2)
    assert written(conv, noise(1, 2, 128, 16))[1] == taps


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's own
def test_padding_when_named_then_read():
    x = noise(1, 4, 20, 20)
    same = nn.Conv2d(4, 4, 7, padding="same", groups=4)
    gm, taps = written(same, x)
    assert len(taps) == 3
    torch.testing.assert_close(gm(x), same(x), rtol=1e-4, atol=1e-5)
    assert len(written(nn.Conv2d(4, 4, 7, padding="valid", groups=4), x)[1]) == 1
    assert len(written(nn.Conv2d(4, 4, 6, padding="same", groups=4), x)[1]) == 1  # uneven


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 8, 7, padding=3, groups=4),
        nn.Conv2d(4, 4, 7, padding=3),
        nn.Conv2d(4, 4, 7, padding=3, groups=2),
    ],
    ids=["several_results", "dense", "grouped"],
)
def test_convolution_when_not_of_one_channel_each_then_left(conv):
    assert len(written(conv, noise(1, 4, 12, 12))[1]) == 1


class Mixer(nn.Module):
    """Large depthwise convolutions of images and of sequences, between pointwise ones."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 1)
        self.image = nn.Conv2d(8, 8, 7, padding=3, groups=8)
        self.sequence = nn.Conv1d(8, 8, 31, padding=15, groups=8)
        self.last = nn.Conv1d(8, 4, 1)

    def forward(self, x):
        y = self.first(x).relu()
        y = (y + self.image(y).relu()).flatten(2)
        return self.last(y + nn.functional.gelu(self.sequence(y)))


def test_kernels_when_lowered_then_right_at_each_batch(tmp_path):
    torch.manual_seed(0)
    model = Mixer().eval()
    data = [(noise(2, 3, 8, 9, seed=seed),) for seed in range(4)]
    artifact = pte_of_batches(model, data)
    assert not artifact.contents().overloads
    calls = [(noise(n, 3, 8, 9, seed=n),) for n in (1, 5, 2)]
    again = call_pte(artifact, calls, tmp_path)
    for x, elsewhere in zip(calls, again, strict=True):
        found, exact = artifact.run(*x), model(*x)
        assert torch.equal(found, elsewhere)
        assert (found - exact).norm() < 0.05 * exact.norm()
