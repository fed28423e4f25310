"""Mean and deviation that a folded batch norm leaves at its layer."""

import torch
from torch import nn

from pt2e_quant.core.output_moments import OUTPUT_MOMENTS_KEY, OutputMoments
from pt2e_quant.passes.batch_norm.fold_batch_norm import fold_batch_norm


def test_moments_when_a_batch_norm_is_folded_then_those_of_its_output():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), norm).eval()
    gm = torch.export.export(model, (torch.randn(1, 3, 2, 2),)).module()
    fold_batch_norm(gm)
    (conv,) = (n for n in gm.graph.nodes if n.name == "conv2d")
    moments = conv.meta[OUTPUT_MOMENTS_KEY]
    assert torch.equal(moments.mean.float(), norm.bias)
    assert torch.equal(moments.deviation.float(), norm.weight.abs())


def test_mapped_when_channels_are_multiplied_and_moved_then_mean_and_deviation_follow():
    found = OutputMoments(torch.tensor([1.0]), torch.tensor([2.0])).mapped(torch.tensor([-3.0]), 1)
    assert (float(found.mean), float(found.deviation)) == (-2.0, 6.0)
