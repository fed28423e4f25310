"""Arguments of operators that the delegate has no field for, or refuses: the result is ATen's."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack import lower
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.flow.calibrate.sample import sqnr_db
from tests.parameters import in_groups

CALLS = {
    "elu alpha": lambda x: F.elu(x, 0.7),
    "elu alpha 0": lambda x: F.elu(x, 0.0),
    "elu alpha below 0": lambda x: F.elu(x, -0.5),
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.5),
    "leaky_relu slope above 1": lambda x: F.leaky_relu(x, 1.5),
    "leaky_relu slope below 0": lambda x: F.leaky_relu(x, -0.2),
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.7),
    "clamp below": lambda x: x.clamp(min=1),
    "clamp to one value": lambda x: x.clamp(1, 1) * x,
    "clamp in reverse": lambda x: x.clamp(1, -1) * x,
    "softmax of columns": lambda x: F.softmax(4 * x, 3),
    "softmax of channels": lambda x: F.softmax(4 * x, 1),
    "avg_pool divisor": lambda x: F.avg_pool2d(
        x, 3, 2, 1, count_include_pad=False, divisor_override=9
    ),
    "avg_pool default stride": lambda x: F.avg_pool2d(x, (1, 2), count_include_pad=False),
    "avg_pool ceil_mode": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True),
    "avg_pool without a batch": lambda x: F.avg_pool2d(x[0], 2, count_include_pad=False),
    "max_pool dilation": lambda x: F.max_pool2d(x, 3, 2, 1, dilation=2),
    "max_pool ceil_mode": lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True),
    "max_pool without a batch": lambda x: F.max_pool2d(x[0], 2),
    "max without a dimension": lambda x: x.max(3)[0],
    "max keeping it": lambda x: x.max(-1, keepdim=True)[0],
    "upsample by a scale": lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"),
    "upsample to a size": lambda x: F.interpolate(x, (5, 13), mode="bilinear"),
    "upsample aligned": lambda x: F.interpolate(
        x, scale_factor=1.5, mode="bilinear", align_corners=True
    ),
    "div rounding_mode": lambda x: torch.div(x, 0.7, rounding_mode="floor"),
    "add alpha": lambda x: torch.add(x, x.flip(1), alpha=0.5),
    "rsub alpha": lambda x: torch.rsub(x, x.flip(1), alpha=3),
    "cat of seven, last dimension": lambda x: torch.cat([x, x * 2, x, x + 1, x, x - 1, x], -1),
    "pad with a value": lambda x: F.pad(x, (1, 2, 0, 3, 1, 0), value=0.5),
    "pad with infinity": lambda x: F.max_pool2d(F.pad(x, (1, 1), value=-torch.inf), 3, 1),
    "pad that crops": lambda x: F.pad(x, (-1, 2, 0, -3), value=2.0),
    "permute with a negative dimension": lambda x: x.permute(0, -1, 1, 2),
    "mean in reverse order": lambda x: x.mean((-1, -2), keepdim=True),
    "mean without the dimensions": lambda x: x.mean((3, 2)),
    "pow 2.0": lambda x: x.pow(2.0),
    "slice from before the start": lambda x: x[:, :, -100:6, 1:7:2],
    "more than six dimensions": lambda x: x[:, :, :6, :8].reshape(-1, 2, 2, 2, 2, 3, 2, 4).exp(),
}


class Several(nn.Module):
    """Operators behind convolutions, so that the delegate has each with channels last."""

    def __init__(self, *calls) -> None:
        super().__init__()
        self.calls = calls
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in calls)
        self.linear = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        found = (call(conv(x)) for call, conv in zip(self.calls, self.convs, strict=True))
        return (*found, self.linear(x))


@pytest.mark.parametrize("names", in_groups(CALLS, 5))
def test_operators_when_their_arguments_are_not_the_defaults_then_as_aten(names, make_noise):
    model = Several(*(CALLS[name] for name in names)).eval()
    x = 2 * make_noise((2, 8, 7, 9))
    artifact = pq.quantize(model, (x,), backend="xnnpack", recipe="w8", progress=False)
    for name, expected, found in zip(names, model(x), artifact.run(x), strict=False):
        assert sqnr_db(expected, found) > 100, name


def test_lowering_when_executorch_fails_then_the_error_names_the_node(monkeypatch, make_noise):
    original = lower.load_program

    def fails_on_cumsum(pte):
        if b"cumsum" in pte:
            raise RuntimeError("error: 0x:1")
        return original(pte)

    monkeypatch.setattr(lower, "load_program", fails_on_cumsum)
    model = Several(lambda x: torch.sin(torch.cumsum(torch.cos(x), 1)))
    with pytest.raises(UnsupportedError, match="0x:1") as caught:
        pq.quantize(model, (make_noise((2, 8, 7, 9)),), backend="xnnpack", recipe="w8")
    assert "node    cumsum (aten.cumsum.default)" in str(caught.value)
    assert "source  test_delegate_limits.py" in str(caught.value)


def test_average_pool_when_quantized_windows_count_less_at_the_border_then_averaged_in_float(
    make_noise,
):
    x = make_noise((2, 8, 7, 9))
    model = Several(lambda x: F.avg_pool2d(x, 2, 1, 1, count_include_pad=False)).eval()
    prepared = pq.prepare_pt2e(torch.export.export(model, (x,)), pq.IntegerQuantizer())
    quantized = pq.convert_pt2e(pq.calibrate(prepared, [(x,)], progress=False))
    artifact = pq.backends.get("xnnpack").lower(quantized)  # XNNPACK refused to load integers
    assert [each.operator for each in pq.audit(artifact).islands] == ["aten.avg_pool2d"]
    # A mean on a tie may go to the next step.
    found, expected = artifact.run(x)[0], quantized(x)[0]
    assert float((found == expected).float().mean()) > 0.99
    assert sqnr_db(expected, found) > 50


class Scaled(nn.Module):
    """A linear times a tensor without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.linear(x) * scale + scale


@pytest.mark.parametrize("recipe", ["int8", "w8"])
def test_product_when_of_an_input_without_dimensions_then_right(make_noise, recipe):
    x, scale = make_noise((2, 8)), torch.tensor(0.5)
    model = Scaled().eval()
    artifact = pq.quantize(
        model, args=(x, scale), calibration_data=[(x, scale)], recipe=recipe, backend="xnnpack"
    )
    assert sqnr_db(model(x, scale), artifact.run(x, scale)) > 30


class Written(nn.Module):
    """An operator whose weight is a buffer that the call writes."""

    def __init__(self, op, *shape: int) -> None:
        super().__init__()
        self.op, self.first = op, nn.Conv2d(4, 8, 1)
        self.register_buffer("weight", torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape))

    def forward(self, x: Tensor) -> Tensor:
        y = self.op(self.first(x), self.weight)
        self.weight.mul_(0.5)
        return y


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        (lambda h, weight: h[0, 0] @ weight, (6, 3)),
        (lambda h, weight: F.linear(h, weight), (5, 6)),
        (lambda h, weight: F.linear(h, weight, weight[:, 0]), (5, 6)),
        (F.conv2d, (4, 8, 1, 1)),
    ],
)
def test_weight_when_calls_write_it_then_each_call_reads_it(op, shape):
    """Packed by the delegate it was missing, and the process crashed in the first call."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 6)
    model = Written(op, *shape).eval()
    backend = pq.backends.get("xnnpack")
    prepared = pq.prepare_pt2e(torch.export.export(model, (x,)), backend.quantizer())
    gm = pq.convert_pt2e(pq.calibrate(prepared, [x], progress=False))
    artifact = backend.lower(gm, verify=False)
    with torch.no_grad():
        expected = [gm(x) for _ in range(3)]
    for one in expected:
        assert sqnr_db(one, artifact.run(x)) > 60
    assert sqnr_db(expected[0], expected[1]) < 20


NOTHING_AT_ONE = """
import torch
from torch import nn
from torch.export import Dim

import pt2e_quant as pq

class Upsampled(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.ConvTranspose2d(16, 32, 1, 2, padding=1, output_padding=1, groups=4)
        self.linear = nn.Linear(8, 8)

    def forward(self, x, y):
        return self.conv(x), self.linear(y)

side = Dim("side", max=16)
model, y = Upsampled().eval(), torch.randn(2, 8)
artifact = pq.quantize(
    model,
    args=(torch.randn(6, 16, 4, 4), y),
    dynamic_shapes=({2: side, 3: side}, None),
    backend="xnnpack",
    recipe="w8",
)
for size in (1, 2, 16, 1, 4):
    x = torch.randn(6, 16, size, size)
    torch.testing.assert_close(artifact.run(x, y)[0], model(x, y)[0], rtol=0, atol=1e-5)
print("right")
"""


@pytest.mark.slow
def test_conv_transpose_when_a_size_gives_no_element_then_it_gives_none():
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NOTHING_AT_ONE],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (made.returncode, made.stdout.split()[-1:]) == (0, ["right"]), made.stderr[-2000:]


class Repeated(nn.Module):
    """One layer at two scales, as a detection head is; a bias of more digits than int32's steps."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(x), self.layer(x * 0.25)])


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Conv2d(4, 6, 3, padding=1), (2, 4, 8, 8)), (nn.Linear(8, 6), (2, 8))],
    ids=["conv", "linear"],
)
def test_layer_when_it_runs_at_two_scales_then_each_has_its_own_bias(layer, shape, make_noise):
    with torch.no_grad():
        layer.bias.fill_(0.0675)
    x = make_noise(shape) * 1e-5
    model = Repeated(layer).eval()
    artifact = pq.quantize(model, args=(x,), calibration_data=[(x,)], backend="xnnpack")
    assert sqnr_db(model(x), artifact.run(x)) > 35


@pytest.mark.parametrize("groups", [1, 2])
def test_conv_transpose_when_its_end_is_padded_by_a_stride_then_in_the_delegate(groups, make_noise):
    layer = nn.ConvTranspose2d(4, 6, 3, padding=1, groups=groups, dilation=2, output_padding=1)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1), layer).eval(), make_noise((2, 3, 6, 5))
    artifact = pq.quantize(model, args=(x,), calibration_data=[(x,)], backend="xnnpack")
    assert sqnr_db(model(x), artifact.run(x)) > 30
    assert artifact.contents().kernels["aten.convolution"] == 0
