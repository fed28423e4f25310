import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pt2e_quant.graph.show import show
from pt2e_quant.passes.batch_norm.fold_batch_norm import fold_batch_norm
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants

IMAGE = torch.randn(4, 4, 6, 6, generator=torch.Generator().manual_seed(1))


class ConvNorm(nn.Module):
    def __init__(self, conv: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.conv = conv
        self.bn = norm

    def forward(self, x):
        return self.bn(self.conv(x)).relu()


def test_conv_when_a_batch_norm_follows_then_both_become_one_conv(program, settled):
    model = settled(ConvNorm(nn.Conv2d(4, 3, 3, bias=False), nn.BatchNorm2d(3)), IMAGE)
    p = program(model, (IMAGE,))
    p.shows(
        """
        x: f32[4, 4, 6, 6] = input
        conv2d: f32[4, 3, 4, 4] = conv2d(x, conv.weight)
        batch_norm: f32[4, 3, 4, 4] = batch_norm(conv2d, bn.weight, bn.bias, bn.running_mean, bn.running_var, False, 0.1, 1e-05, False)
        relu: f32[4, 3, 4, 4] = relu(batch_norm)
        return (relu)
        """  # noqa: E501
    )
    p.apply(fold_batch_norm, drop_dead_constants)
    p.shows(
        """
        x: f32[4, 4, 6, 6] = input
        conv2d: f32[4, 3, 4, 4] = conv2d(x, conv.weight, bias=conv.bias)
        relu: f32[4, 3, 4, 4] = relu(conv2d)
        return (relu)
        """
    )
    assert set(p.gm.state_dict()) == {"conv.weight", "conv.bias"}
    assert isinstance(p.gm.conv.weight, nn.Parameter)
    p.matches((IMAGE * 2,)).leaves_model_alone().is_idempotent(fold_batch_norm)


VOLUME = torch.randn(2, 4, 5, 5, 5, generator=torch.Generator().manual_seed(2))
SIGNAL = torch.randn(3, 4, 9, generator=torch.Generator().manual_seed(3))
ROWS = torch.randn(7, 4, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(
    ("conv", "norm", "x"),
    [
        (nn.Conv1d(4, 6, 3, padding="same"), nn.BatchNorm1d(6), SIGNAL),
        (nn.Conv1d(4, 6, 3, groups=2), nn.BatchNorm1d(6, affine=False), SIGNAL),
        (nn.Conv2d(4, 8, 3, groups=4, stride=2), nn.BatchNorm2d(8, eps=0.1), IMAGE),
        (nn.Conv3d(4, 5, 2, bias=False), nn.BatchNorm3d(5), VOLUME),
        (nn.ConvTranspose1d(4, 6, 3), nn.BatchNorm1d(6), SIGNAL),
        (nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6), IMAGE),
        (nn.ConvTranspose3d(4, 6, 2, groups=2), nn.BatchNorm3d(6), VOLUME),
        (nn.Linear(4, 5), nn.BatchNorm1d(5), ROWS),
        (nn.Linear(4, 5, bias=False), nn.BatchNorm1d(5), ROWS),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else None,
)
def test_producer_when_a_batch_norm_follows_then_the_norm_folds_into_it(
    program, settled, conv, norm, x
):
    p = program(settled(ConvNorm(conv, norm), x), (x,))
    p.apply(fold_batch_norm)
    assert "aten.batch_norm.default" not in p.targets()
    assert len(p.targets()) == 2, "one conv or linear, one relu"
    p.matches((x * 3,)).leaves_model_alone().is_idempotent(fold_batch_norm)


def test_batch_norm_when_behind_views_then_folded_into_the_linear(program, settled):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 6)
            self.bn = nn.BatchNorm1d(6)

        def forward(self, x):
            return self.bn(self.linear(x).transpose(1, 2)).permute(0, 2, 1)

    x = torch.randn(3, 5, 4)
    p = program(settled(Tokens(), x), (x,)).apply(fold_batch_norm)
    p.shows(
        """
        x: f32[3, 5, 4] = input
        linear: f32[3, 5, 6] = linear(x, linear.weight, bias=linear.bias)
        transpose: f32[3, 6, 5] = transpose(linear, 1, 2)
        permute: f32[3, 5, 6] = permute(transpose, [0, 2, 1])
        return (permute)
        """
    )
    p.matches()


def test_fold_when_the_batch_is_dynamic_then_it_stays_dynamic(program, settled):
    model = settled(ConvNorm(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3)), IMAGE)
    batch = torch.export.Dim("batch", min=2, max=16)
    p = program(model, (IMAGE,), ({0: batch},)).apply(fold_batch_norm)
    assert "conv2d: f32[s0, 3, 4, 4]" in p.text
    p.matches((IMAGE[:2],), (torch.cat([IMAGE, IMAGE]),))


def test_batch_norm_when_it_has_no_producer_then_becomes_an_affine(program, settled):
    model = settled(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4)), IMAGE)
    p = program(model, (IMAGE,)).apply(fold_batch_norm, drop_dead_constants)
    p.shows(
        """
        input: f32[4, 4, 6, 6] = input
        relu: f32[4, 4, 6, 6] = relu(input)
        mul: f32[4, 4, 6, 6] = mul(relu, 1.weight)
        add: f32[4, 4, 6, 6] = add(mul, 1.bias)
        return (add)
        """
    )
    assert p.gm.get_parameter("1.weight").shape == (4, 1, 1)
    assert p.skips == []
    p.matches().leaves_model_alone().is_idempotent(fold_batch_norm)


def test_batch_norm_when_decomposed_by_torch_then_folded(settled):
    model = settled(ConvNorm(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3)), IMAGE)
    ep = torch.export.export(model, (IMAGE,)).run_decompositions({})
    gm = ep.module()
    assert "batch_norm" in show(gm)
    expected = gm(IMAGE)
    assert fold_batch_norm(gm).changed
    assert "batch_norm" not in show(gm)
    torch.testing.assert_close(gm(IMAGE), expected, rtol=1e-5, atol=1e-5)


def test_fold_when_the_conv_has_two_readers_then_becomes_an_affine(program, settled):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)
            self.bn = nn.BatchNorm2d(4)

        def forward(self, x):
            y = self.conv(x)
            return self.bn(y) + y

    p = program(settled(Two(), IMAGE), (IMAGE,)).apply(fold_batch_norm)
    assert p.skips == ["left as a per-channel affine: conv2d is read by 2 nodes"]
    assert {"aten.mul.Tensor", "aten.add.Tensor"} <= set(p.targets())
    p.matches().leaves_model_alone()


def test_fold_when_two_convs_share_the_weight_then_becomes_an_affine(program, settled):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1, bias=False)
            self.bn = nn.BatchNorm2d(4)
            self.bn2 = nn.BatchNorm2d(4)

        def forward(self, x):
            return self.bn2(self.conv(self.bn(self.conv(x))))

    p = program(settled(Shared(), IMAGE), (IMAGE,)).apply(fold_batch_norm)
    assert p.skips == [
        "left as a per-channel affine: conv_weight of conv2d is shared with conv2d_1",
        "left as a per-channel affine: conv_weight of conv2d_1 is shared with conv2d",
    ]
    assert p.text.count("conv.weight)") == 2
    p.matches().leaves_model_alone()


def test_fold_when_the_weight_is_computed_then_becomes_an_affine(program, settled):
    class Computed(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn = nn.BatchNorm2d(4)

        def forward(self, x, w):
            return self.bn(F.conv2d(x, w))

    model = Computed().eval()
    args = (IMAGE, torch.randn(4, 4, 1, 1))
    p = program(model, args).apply(fold_batch_norm)
    assert p.skips == ["left as a per-channel affine: weight of conv2d is computed at run time"]
    p.matches()


def test_fold_when_another_dimension_is_normalised_then_becomes_an_affine(program, settled):
    class Across(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 6)
            self.bn = nn.BatchNorm1d(5)

        def forward(self, x):
            return self.bn(self.linear(x))

    x = torch.randn(3, 5, 4)
    p = program(settled(Across(), x), (x,)).apply(fold_batch_norm)
    assert p.skips == [
        "left as a per-channel affine: the normalised dimension is not the output channel of linear"
    ]
    p.matches()


@pytest.mark.parametrize("width", [7, 16])
def test_norm_when_the_conv_reads_one_image_then_rows_are_normalised(program, settled, width):
    """Without a batch dimension the convolution's channels are dimension 0, not 1."""

    class Unbatched(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(2, 16, 3, padding=1)
            self.bn = nn.BatchNorm1d(width)

        def forward(self, x):
            return self.bn(self.conv(x))

    x = torch.randn(2, width)
    p = program(settled(Unbatched(), x), (x,)).apply(fold_batch_norm)
    assert p.skips == [
        "left as a per-channel affine: the normalised dimension is not the output channel of conv1d"
    ]
    p.matches()


def test_fold_when_in_training_mode_then_declined(program):
    model = ConvNorm(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3))
    p = program(model, (IMAGE,), train=True)
    result = fold_batch_norm(p.gm)
    assert not result.changed
    assert [n.text for n in result.notes] == [
        "batch_norm is in training mode: export the model after eval()"
    ]


def test_fold_when_there_are_no_running_statistics_then_declined(program):
    model = ConvNorm(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3, track_running_stats=False))
    p = program(model, (IMAGE,)).apply(fold_batch_norm)
    assert p.skips == ["batch_norm is in training mode: export the model after eval()"]


def test_fold_when_half_precision_then_the_weight_keeps_its_dtype(program, settled):
    model = settled(ConvNorm(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3)), IMAGE).bfloat16()
    p = program(model, (IMAGE.bfloat16(),)).apply(fold_batch_norm)
    assert p.gm.conv.weight.dtype == torch.bfloat16
    # bfloat16 keeps 8 bits: two roundings of weights and sums of 36 products
    p.matches(rtol=0.05, atol=0.05)


def test_new_nodes_when_a_norm_becomes_an_affine_then_carry_its_trace(program, settled):
    model = settled(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(4)), IMAGE)
    p = program(model, (IMAGE,)).apply(fold_batch_norm)
    for node in p.gm.graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta
            assert "nn_module_stack" in node.meta
            assert "stack_trace" in node.meta
