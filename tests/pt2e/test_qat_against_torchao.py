"""The same models trained a little under torchao's own PT2E and ours: equal q/dq, qparams, outputs.

What torchao converts by is not what it trained with where its fused fake-quantize is symmetric:
the comparison takes the scales that it trained with. docs/migration.md names the differences.
"""

import copy
import warnings

import pytest
import torch
from torch import nn

pytest.importorskip("torchao")
xnnpack = pytest.importorskip("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")

from pt2e_flows import Outcome  # noqa: E402
from pt2e_models import MODELS, Lambda, images, rows  # noqa: E402
from qat_nets import settled  # noqa: E402
from test_behaviour import close, counts  # noqa: E402
from torchao.quantization.pt2e import (  # noqa: E402
    FusedMovingAvgObsFakeQuantize,
    move_exported_model_to_eval,
)
from torchao.quantization.pt2e import quantize_pt2e as theirs  # noqa: E402
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86  # noqa: E402

from pt2e_quant.pt2e import quantize_pt2e as ours  # noqa: E402

pytestmark = pytest.mark.usefixtures("cached_patterns")

QUANTIZERS = {
    "xnnpack": lambda: xnnpack.XNNPACKQuantizer().set_global(
        xnnpack.get_symmetric_quantization_config(is_per_channel=True, is_qat=True)
    ),
    "x86": lambda: x86.X86InductorQuantizer().set_global(
        x86.get_default_x86_inductor_quantization_config(is_qat=True)
    ),
}


def chain(*modules):
    return settled(nn.Sequential(*modules))


TRAINED = {
    "bn_relu_twice": lambda: (
        chain(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 1),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
        ),
        (images(n=2),),
    ),
    "residual_bn": lambda: (
        settled(
            Lambda(
                lambda m, x: torch.relu(m.bn(m.c(x)) + x),
                c=nn.Conv2d(3, 3, 3, padding=1, bias=False),
                bn=nn.BatchNorm2d(3),
            )
        ),
        (images(n=2),),
    ),
    "depthwise_bn": lambda: (
        chain(
            nn.Conv2d(3, 6, 1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU6(),
            nn.Conv2d(6, 6, 3, groups=6, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU6(),
        ),
        (images(n=2),),
    ),
    "conv1d_bn": lambda: (
        chain(nn.Conv1d(8, 4, 3), nn.BatchNorm1d(4), nn.ReLU()),
        (rows(n=6).reshape(2, 8, 3),),
    ),
    "bn_pool_linear": lambda: (
        chain(
            nn.Conv2d(3, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, 3),
        ),
        (images(n=2),),
    ),
}
QUICK = {("bn_relu_twice", "xnnpack"), ("linear_relu", "x86")}
NETS = MODELS | TRAINED
# docs/migration.md says why: theirs trains a transposed weight along its inputs; the x86 quantizer
# quantizes what it would not in inference where it sees a batch norm; in-place operators.
OTHERWISE = {
    ("conv_transpose", "xnnpack"),
    ("conv1d_bn", "xnnpack"),
    ("residual_inplace", "x86"),
    *((name, "x86") for name in ("conv_bn", "conv_bn_relu", *TRAINED)),
}
CASES = [
    (n, q) if (n, q) in QUICK else pytest.param(n, q, marks=pytest.mark.slow)
    for q in QUANTIZERS
    for n in NETS
    if (n, q) not in OTHERWISE
]
# torchao leaves dropout in the graph, and q/dq around it.
DROPPED = {"dropout"}


def trained(flow, model, inputs, quantizer):
    """A model after three batches in training mode and one in evaluation, converted."""
    exported = torch.export.export(copy.deepcopy(model).train(), inputs, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = flow.prepare_qat_pt2e(exported.module(), quantizer())
    for step in range(3):
        prepared(*(x + 0.1 * step if x.is_floating_point() else x for x in inputs))
    if flow is theirs:
        move_exported_model_to_eval(prepared)
    else:
        prepared.eval()
    with torch.no_grad():
        prepared(*inputs)
        converted = flow.convert_pt2e(prepared)
        return Outcome(converted, torch.utils._pytree.tree_leaves(converted(*inputs)))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "quantizer"), CASES)
def test_model_when_trained_then_converted_as_torchao_does(name, quantizer, monkeypatch):
    monkeypatch.setattr(
        FusedMovingAvgObsFakeQuantize,
        "calculate_qparams",
        lambda self: (self.scale, self.zero_point),
    )
    torch.manual_seed(0)
    model, inputs = NETS[name]()
    expected, found = (
        trained(flow, model, inputs, QUANTIZERS[quantizer]) for flow in (theirs, ours)
    )
    if name in DROPPED:
        assert not (counts(found) - counts(expected))
        return
    assert +counts(found) == +counts(expected)
    assert close(found.qparams, expected.qparams, 1e-6)
    step = max([1e-6, *(float(q[2][0]) for q in found.qparams if isinstance(q[2][0], float))])
    for a, b in zip(found.outputs, expected.outputs, strict=True):
        # The folded constants round differently: a value at a tie may go the other way.
        assert float((a - b).abs().max()) <= 2 * step
        assert float(((a - b).abs() > 1e-5).float().mean()) <= 0.05
