import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from pt2e_quant.graph.ops import BATCH_NORM, arguments, aten, is_call
from pt2e_quant.passes.batch_norm.expanded_conv_bn import expand_conv_bn, fold_expanded_conv_bn
from pt2e_quant.passes.batch_norm.trained_batch_norm import freeze_bn_stats, update_bn_stats

KINDS = {
    "conv1d": lambda: (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), (4, 3, 9)),
    "conv2d": lambda: (nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), (4, 3, 7, 7)),
    "without_bias": lambda: (nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), (4, 3, 7, 7)),
    "depthwise": lambda: (nn.Conv2d(4, 8, 3, groups=4), nn.BatchNorm2d(8), (4, 4, 7, 7)),
    "other_eps": lambda: (nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, 0.1, 0.3), (4, 3, 7, 7)),
    "transposed_1d": lambda: (nn.ConvTranspose1d(3, 4, 3), nn.BatchNorm1d(4), (4, 3, 7)),
    "transposed_2d": lambda: (nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4), (4, 3, 7, 7)),
}
LEFT = {
    "linear": lambda: (nn.Linear(3, 4), nn.BatchNorm1d(4), (8, 3)),
    "conv3d": lambda: (nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3), (2, 2, 4, 4, 4)),
    "grouped_transposed": lambda: (
        nn.ConvTranspose2d(4, 4, 3, groups=2),
        nn.BatchNorm2d(4),
        (4, 4, 7, 7),
    ),
    "not_affine": lambda: (nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, affine=False), (4, 3, 7, 7)),
}


class ReadTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) + y


def exported(model, x, *, train=True):
    return torch.export.export(model.train(train), (x,)).module(check_guards=False)


def made(kinds, kind):
    torch.manual_seed(0)
    conv, norm, shape = kinds[kind]()
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias)
    return nn.Sequential(conv, norm), torch.randn(shape)


def norms_of(gm):
    return [node for node in gm.graph.nodes if is_call(node, BATCH_NORM)]


@pytest.mark.parametrize("kind", KINDS)
def test_conv_bn_when_expanded_then_it_trains_as_before(kind):
    model, x = made(KINDS, kind)
    plain = exported(model, x)
    expected = plain(x).detach().clone()
    mean = model[1].running_mean.clone()
    model[1].reset_running_stats()
    gm = exported(model, x)
    sources = expand_conv_bn(gm)
    torch.testing.assert_close(gm(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model[1].running_mean, mean, rtol=1e-4, atol=1e-5)
    assert {str(node.target) for node in sources.values()} >= {"0.weight"}
    assert [str(s.target) for s in sources].count("aten.mul.Tensor") == 1
    (norm,) = norms_of(gm)
    assert arguments(norm)["eps"] == model[1].eps
    assert arguments(norm)["momentum"] == model[1].momentum


@pytest.mark.parametrize("kind", LEFT)
def test_conv_bn_when_torchao_does_not_write_it_out_then_left(kind):
    torch.manual_seed(0)
    conv, norm, shape = LEFT[kind]()
    gm = exported(nn.Sequential(conv, norm), torch.randn(shape))
    code = gm.code
    assert not expand_conv_bn(gm)
    assert gm.code == code


def test_conv_bn_when_the_conv_has_another_reader_then_left():
    gm = exported(ReadTwice(), torch.randn(2, 3, 4, 4))
    assert not expand_conv_bn(gm)


def test_conv_bn_when_expanded_and_frozen_then_its_statistics_stay():
    model, x = made(KINDS, "conv2d")
    gm = exported(model, x)
    expand_conv_bn(gm)
    gm.apply(freeze_bn_stats)
    before = model[1].running_mean.clone()
    gm(x)
    assert torch.equal(model[1].running_mean, before)
    gm.apply(update_bn_stats)
    gm(x)
    assert not torch.equal(model[1].running_mean, before)


@pytest.mark.parametrize("kind", KINDS)
def test_conv_bn_when_folded_then_by_torchs_own_arithmetic(kind):
    model, x = made(KINDS, kind)
    conv, norm = model
    gm = exported(model, x)
    expand_conv_bn(gm)
    for _ in range(2):
        gm(x)
    weight, bias = fuse_conv_bn_weights(
        conv.weight.detach(),
        None if conv.bias is None else conv.bias.detach(),
        norm.running_mean,
        norm.running_var,
        norm.eps,
        norm.weight.detach(),
        norm.bias.detach(),
        transpose="transposed" in kind,
    )
    expected = model.eval()(x)
    assert fold_expanded_conv_bn(gm).changed
    assert not norms_of(gm)
    assert not any(is_call(node, (aten.add_.Tensor, aten.sqrt.default)) for node in gm.graph.nodes)
    torch.testing.assert_close(gm(x), expected, rtol=1e-4, atol=1e-5)
    folded = gm.get_submodule("0")
    assert torch.equal(folded.weight, weight)
    assert torch.equal(folded.bias, bias)
    assert not fold_expanded_conv_bn(gm).changed
