"""Training held against torch.ao's own: outputs, gradients, statistics equal to the last bit."""

import copy

import pytest
import torch
from qat_nets import QatQuantizer, settled
from torch import nn
from torch.ao import quantization as ao
from torch.ao.quantization.quantize_fx import prepare_qat_fx

from pt2e_quant.flow.qat.prepare_qat_pt2e import prepare_qat_pt2e
from pt2e_quant.observers.training.fake_quantize import disable_observer
from pt2e_quant.passes.batch_norm.trained_batch_norm import freeze_bn_stats

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

QCONFIG = ao.QConfig(
    activation=ao.FusedMovingAvgObsFakeQuantize.with_args(
        observer=ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
    ),
    weight=ao.FusedMovingAvgObsFakeQuantize.with_args(
        observer=ao.MovingAveragePerChannelMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
    ),
)
EVERYWHERE = ao.QConfigMapping().set_global(QCONFIG)


def net(conv, norm, *behind):
    return settled(nn.Sequential(conv, norm, *behind))


def data(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


KINDS = {
    "conv1d": lambda: (net(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU()), data(4, 3, 9)),
    "conv2d": lambda: (
        net(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()),
        data(4, 3, 6, 6),
    ),
    "conv2d_with_bias": lambda: (
        net(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4, eps=1e-2, momentum=0.3), nn.ReLU()),
        data(4, 3, 6, 6),
    ),
    "depthwise": lambda: (
        net(nn.Conv2d(4, 8, 3, groups=4, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        data(4, 4, 6, 6),
    ),
    "no_activation": lambda: (net(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), data(4, 3, 6, 6)),
    "conv3d": lambda: (net(nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3), nn.ReLU()), data(2, 2, 4, 4, 4)),
    "linear": lambda: (net(nn.Linear(6, 4), nn.BatchNorm1d(4)), data(8, 6)),
    "linear_without_bias": lambda: (
        net(nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4)),
        data(8, 6),
    ),
    "two": lambda: (
        net(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 5, 3),
            nn.BatchNorm2d(5),
            nn.ReLU(),
        ),
        data(4, 3, 7, 7),
    ),
}


def both(kind):
    model, x = KINDS[kind]()
    model.train()
    theirs = prepare_qat_fx(copy.deepcopy(model), EVERYWHERE, (x,))
    ours = prepare_qat_pt2e(torch.export.export(model, (x,)), QatQuantizer())
    return theirs, ours, x


def by_their_names(theirs, ours):
    """Parameters and statistics of ours with theirs: (ours, theirs) by our names."""
    named = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    pairs = {}
    for name, value in [*ours.named_parameters(), *ours.named_buffers()]:
        if name.startswith("activation_post_process"):
            continue
        number, leaf = name.split(".")
        for other in (f"{number}.{leaf}", f"{int(number) - 1}.bn.{leaf}"):
            if other in named:
                pairs[name] = value, named[other]
    return pairs


@pytest.mark.parametrize("kind", KINDS)
def test_training_when_side_by_side_then_equal_to_the_bit(kind):
    theirs, ours, x = both(kind)
    pairs = by_their_names(theirs, ours)
    assert len(pairs) == len(dict(ours.named_parameters())) + 3 * str(ours.code).count("_norm(")
    optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (theirs, ours)]
    for step in range(4):
        outputs = [m(x * (1 + 0.1 * step)) for m in (theirs, ours)]
        assert torch.equal(*outputs)
        for optimizer, y in zip(optimizers, outputs, strict=True):
            optimizer.zero_grad()
            y.square().mean().backward()
        for name, (own, their) in pairs.items():
            if own.requires_grad:
                assert torch.equal(own.grad, their.grad), name
        for optimizer in optimizers:
            optimizer.step()
        for name, (own, their) in pairs.items():
            assert torch.equal(own, their), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("frozen", [False, True])
def test_evaluation_when_side_by_side_then_on_the_same_grid(kind, frozen):
    theirs, ours, x = both(kind)
    for _ in range(3):
        theirs(x)
        ours(x)
    if frozen:
        ours.apply(freeze_bn_stats)
        theirs.apply(ao.fake_quantize.disable_observer)
        # Their own function for `apply` leaves LinearBn1d out.
        theirs.apply(lambda m: getattr(m, "freeze_bn_stats", m.parameters)())
    else:
        theirs.eval()
        ours.eval()
        theirs.apply(ao.fake_quantize.disable_observer)
    ours.apply(disable_observer)
    expected, found = theirs(x), ours(x)
    last = [m for m in ours.modules() if hasattr(m, "fake_quant_enabled")][-1]
    step = float(last.scale)
    # The folded bias is rounded once, theirs is added after a division: ties can part.
    steps = ((expected - found) / step).round()
    torch.testing.assert_close(found, expected, rtol=0, atol=1.001 * step)
    assert (steps != 0).float().mean() <= 0.01
