"""The same models trained a little under torchao's own PT2E and ours, in its form: all is equal.

Operators of the training graph, what it gives, q/dq, qparams and outputs, to the last bit.
docs/migration.md names the differences.
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
from test_behaviour import counts  # noqa: E402
from torchao.quantization.pt2e import move_exported_model_to_eval  # noqa: E402
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
QUICK = {("bn_relu_twice", "xnnpack"), ("linear_relu", "x86"), ("residual_bn", "x86")}
NETS = MODELS | TRAINED
# docs/migration.md says why: theirs trains a transposed weight along its inputs, counts the batches
# of a 1d batch norm on in the converted graph, and keeps in-place operators.
OTHERWISE = {
    ("conv_transpose", "xnnpack"),
    ("conv1d_bn", "xnnpack"),
    ("residual_inplace", "x86"),
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
    """A model's training graph, what it gives in three batches, and the result converted."""
    exported = torch.export.export(copy.deepcopy(model).train(), inputs, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = flow.prepare_qat_pt2e(exported.module(), quantizer())
    operators = counts(Outcome(prepared, []))
    training = []
    for step in range(3):
        result = prepared(*(x + 0.1 * step if x.is_floating_point() else x for x in inputs))
        training += torch.utils._pytree.tree_leaves(result)
    if flow is theirs:
        move_exported_model_to_eval(prepared)
    else:
        prepared.eval()
    with torch.no_grad():
        prepared(*inputs)
        converted = flow.convert_pt2e(prepared)
        outputs = torch.utils._pytree.tree_leaves(converted(*inputs))
    return operators, training, Outcome(converted, outputs)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("name", "quantizer"), CASES)
def test_model_when_trained_then_converted_as_torchao_does(name, quantizer):
    torch.manual_seed(0)
    model, inputs = NETS[name]()
    operators, training, expected = trained(theirs, model, inputs, QUANTIZERS[quantizer])
    own_operators, own_training, found = trained(ours, model, inputs, QUANTIZERS[quantizer])
    if name in DROPPED:
        assert not (counts(found) - counts(expected))
        return
    assert own_operators == operators
    assert all(torch.equal(a, b) for a, b in zip(own_training, training, strict=True))
    assert +counts(found) == +counts(expected)
    assert found.qparams == expected.qparams
    assert all(torch.equal(a, b) for a, b in zip(found.outputs, expected.outputs, strict=True))
