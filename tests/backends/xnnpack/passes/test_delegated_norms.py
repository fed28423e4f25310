"""Norms run inside of the delegate, and find variances of what lies far from zero."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.passes.delegated_functions import functions_in_delegate
from pt2e_quant.graph.ops import LAYER_NORM, PERMUTE, is_call
from pt2e_quant.graph.pipeline import run_passes
from tests.backends.call_saved import call_pte
from tests.call_function import Call


class OfChannels(nn.Module):
    """A layer norm of the channels of images, between two moves of axes."""

    def __init__(self, channels, *, affine=True):
        super().__init__()
        self.norm = nn.LayerNorm(channels, elementwise_affine=affine)

    def forward(self, x):
        return self.norm(x.permute(0, 2, 3, 1)).movedim(-1, 1)


NORMS = {
    "group": lambda: nn.GroupNorm(4, 16),
    "one_group": lambda: nn.GroupNorm(1, 16),
    "instance": lambda: nn.InstanceNorm2d(16, affine=True),
    "instance_plain": lambda: nn.InstanceNorm2d(16),
    "channels": lambda: OfChannels(16),
    "channels_plain": lambda: OfChannels(16, affine=False),
}


class Between(nn.Module):
    """A norm between two convolutions; its input is a result too."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 16, 3), norm, nn.Conv2d(16, 8, 1)

    def forward(self, x):
        y = self.first(x)
        z = self.norm(y)
        return y, z, self.last(z.relu())


def drawn(norm, seed=0):
    """A norm with other factors than 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in norm.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return norm.eval()


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def written(norm, x):
    """A norm's graph after the pass, and its record."""
    gm = torch.export.export(norm, (x,)).module()
    return gm, run_passes(gm, (functions_in_delegate,))[0]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_norm_when_written_for_the_delegate_then_equal_to_rounding(data):
    groups, each = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    behind = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    affine = data.draw(st.booleans())
    x = noise(data.draw(st.integers(1, 3)), groups * each, *behind, 2) * 3 + 1
    norm = drawn(nn.GroupNorm(groups, groups * each, affine=affine, eps=0.1))
    gm, record = written(norm, x)
    assert record.changed
    torch.testing.assert_close(gm(x), norm(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_norm_when_the_mean_is_a_thousand_deviations_then_precise(name):
    x = noise(2, 16, 9, 11) + 1000
    norm = drawn(NORMS[name]())
    gm, record = written(norm, x)
    assert record.changed
    torch.testing.assert_close(gm(x).double(), norm.double()(x.double()), rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "width", "is_written"), [(128, 64, True), (64, 64, False), (128, 256, False)]
)
def test_layer_norm_when_many_narrow_rows_then_written(rows, width, is_written):
    norm, x = drawn(nn.LayerNorm(width)), noise(2, rows // 2, width)
    gm, record = written(norm, x)
    assert record.changed == is_written
    torch.testing.assert_close(gm(x), norm(x), rtol=1e-5, atol=1e-5)


def test_norm_of_channels_when_what_follows_reads_them_last_then_moved_behind_the_norm():
    norm = nn.LayerNorm(6)
    gm, _ = written(Call(lambda x: norm(x.permute(0, 2, 3, 1)).relu()), noise(1, 6, 4, 4))
    assert not gm.graph.find_nodes(op="call_function", target=LAYER_NORM[0])
    (moved,) = (n for n in gm.graph.nodes if is_call(n, PERMUTE))
    assert [str(u.target) for u in moved.users] == ["aten.relu.default"]


@pytest.mark.parametrize(
    ("norm", "x"),
    [
        (nn.GroupNorm(2, 4).double(), noise(1, 4, 3, 3).double()),
        (nn.GroupNorm(2, 4), noise(3, 4)),
        (nn.LayerNorm((3, 4)), noise(256, 3, 4)),
        (Call(lambda x: nn.functional.layer_norm(x.permute(0, 2, 1, 3), (5,))), noise(1, 4, 3, 5)),
    ],
    ids=["float64", "no_axes", "two_axes", "other_axes"],
)
def test_norm_when_there_is_no_form_then_left(norm, x):
    assert not written(norm, x)[1].changed


@pytest.mark.parametrize("name", NORMS)
def test_norm_when_lowered_then_in_the_delegate_at_each_size(name, tmp_path):
    torch.manual_seed(0)
    model = Between(drawn(NORMS[name]())).eval()
    data = [(noise(2, 3, 11, 13, seed=seed),) for seed in range(2)]
    sizes = {
        0: Dim("batch", min=1, max=8),
        2: Dim("height", min=4, max=32),
        3: Dim("width", min=4, max=32),
    }
    artifact = pq.quantize(
        model,
        data[0],
        dynamic_shapes={"x": sizes},
        calibration_data=data,
        backend="xnnpack",
        progress=False,
    )
    overloads = artifact.contents().overloads
    assert all(name.startswith("dim_order_ops") for name in overloads), overloads
    calls = [(noise(*shape, seed=3),) for shape in ((1, 3, 7, 5), (5, 3, 20, 9), (2, 3, 11, 13))]
    again = call_pte(artifact, calls, tmp_path)
    for x, elsewhere in zip(calls, again, strict=True):
        y, z, last = artifact.run(*x)
        torch.testing.assert_close(elsewhere, [y, z, last], rtol=0, atol=0)
        torch.testing.assert_close(z, model.norm(y), rtol=1e-4, atol=1e-4)
