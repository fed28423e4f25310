"""Every operator with a weight between two others, where measured times decide what stays float.

Such an operator may stay float between integers and keep an integer weight: a graph that tests with
integers everywhere do not have.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pt2e_quant as pq

OPERATORS = {
    "conv1d": lambda: (nn.Conv1d(8, 12, 3), 1),
    "conv1d_depthwise": lambda: (nn.Conv1d(8, 8, 3, groups=8), 1),
    "conv2d": lambda: (nn.Conv2d(8, 12, 3), 2),
    "conv2d_grouped": lambda: (nn.Conv2d(8, 12, 3, groups=4), 2),
    "conv3d": lambda: (nn.Conv3d(8, 12, 3), 3),
    "conv_transpose1d": lambda: (nn.ConvTranspose1d(8, 12, 4, 2, 1), 1),
    "conv_transpose2d": lambda: (nn.ConvTranspose2d(8, 12, 4, 2, 1), 2),
    "conv_transpose2d_grouped": lambda: (nn.ConvTranspose2d(8, 12, 4, groups=4), 2),
    "conv_transpose2d_depthwise": lambda: (nn.ConvTranspose2d(8, 8, 2, 2, groups=8), 2),
    "conv_transpose3d": lambda: (nn.ConvTranspose3d(8, 12, 2, 2), 3),
    "linear": lambda: (nn.Linear(10, 12), 1),
}


class Between(nn.Module):
    """An operator between two convolutions."""

    def __init__(self, operator: nn.Module, dims: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first, self.operator = conv(3, 8, 3, padding=1), operator
        with torch.no_grad():
            channels = operator(torch.zeros(1, 8, *(10,) * dims)).shape[1]
        self.last = conv(channels, 4, 2)

    def forward(self, x):
        return self.last(torch.relu(self.operator(torch.relu(self.first(x)))))


@pytest.mark.parametrize("name", OPERATORS)
def test_operator_when_times_decide_what_is_float_then_converted(name):
    torch.manual_seed(0)
    operator, dims = OPERATORS[name]()
    model = Between(operator, dims).eval()
    batches = [(torch.randn(2, 3, *(10,) * dims),) for _ in range(8)]
    program = torch.export.export(model, batches[0])
    prepared = pq.prepare_pt2e(program, pq.backends.get("onnx").quantizer("int8"))
    converted = pq.convert_pt2e(pq.calibrate(prepared, batches, progress=False))
    assert pq.sqnr_db(model(*batches[0]), converted(*batches[0])) > 25.0


class ComputedBias(nn.Module):
    """Layers whose bias is an input, or what another layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.makes = nn.Linear(6, 6), nn.Linear(6, 6)
        self.conv = nn.Parameter(torch.randn(6, 6, 1, 1))
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x, bias):
        y = self.first(x)
        made = self.makes(bias)
        linear = F.linear(y, self.weight, made)
        return F.linear(y, self.weight, bias), F.conv2d(linear[..., None, None], self.conv, made)


def test_bias_when_computed_at_run_time_then_float_and_the_product_in_integers():
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    torch.manual_seed(0)
    model, args = ComputedBias().eval(), (torch.randn(5, 6), torch.randn(6))
    backend = pq.backends.get("onnx").allowing_slower()
    artifact = pq.quantize(model, args, calibration_data=[args], backend=backend, progress=False)
    assert sum(artifact.report.integer_ops.values()) >= 3
    for expected, found in zip(model(*args), artifact.run(*args), strict=True):
        assert pq.sqnr_db(expected, found) > 30.0
