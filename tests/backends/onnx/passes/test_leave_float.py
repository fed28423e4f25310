"""Products whose integers ONNX Runtime does not take by itself."""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import pt2e_quant as pq
from benchmarks.measure import sqnr_db
from pt2e_quant.backends.onnx import lower as lowering
from pt2e_quant.backends.onnx.passes.leave_float import LeftFloat
from pt2e_quant.backends.onnx.report import Refused
from pt2e_quant.backends.target.in_float import in_float
from pt2e_quant.core.errors import ArtifactError

pytestmark = pytest.mark.usefixtures("integers_everywhere")


def quantized(model: nn.Module, *args: Tensor, dynamic: Any = None) -> Any:
    torch.manual_seed(0)
    return pq.quantize(
        model.eval(),
        args,
        calibration_data=[args],
        dynamic_shapes=dynamic,
        backend="onnx",
        recipe="int8",
        progress=False,
    )


class MelBands(nn.Module):
    """A product that ONNX Runtime moves the transpose behind the logarithm into."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mel", torch.rand(17, 8))
        self.conv = nn.Conv1d(1, 34, 32, stride=16)

    def forward(self, wave: Tensor) -> Tensor:
        real, imaginary = self.conv(wave[:, None]).chunk(2, 1)
        power = real.square() + imaginary.square()
        return torch.log10((power.mT @ self.mel).clamp(min=1e-5)).mT


class Alone(nn.Module):
    """Convolutions of one image without a batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, image: Tensor) -> Tensor:
        return self.last(self.first(image))


def test_product_when_runtime_takes_no_integers_then_it_is_written_as_integers() -> None:
    batch = torch.export.Dim("batch", min=1, max=16)
    artifact = quantized(MelBands(), torch.randn(4, 128), dynamic=({0: batch},))
    assert artifact.report.integer_ops["MatMulIntegerToFloat"] == 1
    assert "MatMul" not in artifact.report.float_ops


def test_convolution_when_image_has_no_batch_then_it_runs_in_integers() -> None:
    artifact = quantized(Alone(), torch.randn(3, 9, 9))
    assert artifact.report.integer_ops["QLinearConv"] == 2
    assert artifact.report.float_regions == []
    assert artifact.report.sqnr_canonical_db > 60


@pytest.mark.parametrize("is_transposed", [False, True])
def test_convolution_when_its_result_has_16_bits_then_its_weight_keeps_its_values(
    is_transposed: bool,
) -> None:
    kind = nn.ConvTranspose2d if is_transposed else nn.Conv2d
    model = nn.Sequential(kind(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 1)).eval()
    images = [torch.randn(2, 3, 8, 8) for _ in range(2)]
    program = torch.export.export(model, (images[0],))
    prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    converted = pq.convert_pt2e(pq.calibrate(prepared, images, progress=False))
    artifact = pq.backends.get("onnx").lower(converted)
    parity = pq.verify_parity(artifact, images)
    # A transposed one sums in float in another order, which decides ties of 16 bits.
    assert parity.share_equal >= (0.99 if is_transposed else 1.0)
    assert parity.most_steps <= 1
    parts = [region.what.split()[0] for region in artifact.report.float_regions]
    assert ("ConvTranspose" if is_transposed else "Conv") in parts


class Pair(nn.Module):
    """Two linears that share one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).sin())


def test_product_when_it_cannot_be_written_then_it_is_float_with_a_note(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        "pt2e_quant.backends.onnx.passes.leave_float.write_product", lambda node, is_portable: False
    )
    refuse_first(monkeypatch)
    artifact = quantized(Pair(), torch.randn(4, 16))
    left = [i.node for i in artifact.report.float_regions if i.what == "Gemm in float"]
    assert left == ["linear in first"]
    assert artifact.report.float_ops["Gemm"] == artifact.report.integer_ops["QGemm"] == 1
    assert artifact.report.sqnr_canonical_db > 60


def test_product_when_it_stays_refused_then_error_names_node_module_and_fix(
    monkeypatch: Any,
) -> None:
    def none(model: ir.Model, refused: Sequence[Refused], *, portable: bool) -> None:
        return None

    monkeypatch.setattr(lowering, "leave_float", none)
    monkeypatch.setattr(lowering, "refused_weights", lambda _: [FIRST])
    with pytest.raises(ArtifactError, match="runs in float") as caught:
        quantized(Pair(), torch.randn(4, 16))
    assert caught.value.node_name == FIRST.weight
    assert "module  first" in str(caught.value)
    assert "set_module_name" in str(caught.value)


FIRST = Refused("Gemm", "dequantize_per_channel")


def refuse_first(monkeypatch: Any) -> None:
    """Have the first weight refused, in the first of several looks."""
    looks = iter([[FIRST]])
    monkeypatch.setattr(lowering, "refused_weights", lambda _: next(looks, []))


def test_float_region_when_a_module_is_known_then_it_is_named() -> None:
    assert LeftFloat("Conv", "conv2d").float_region({"conv2d": "a.b"}).node == "conv2d in a.b"
    assert LeftFloat("Conv", "conv2d").float_region({}).node == "conv2d"


class Rows(nn.Module):
    """Linears on rows of two dimensions, whose biases are added behind a MatMul."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())  # type: ignore[no-any-return]


def test_bias_when_its_product_is_left_float_then_it_is_dequantized_at_load() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    program = torch.export.export(Rows().eval(), (x,))
    onnx = pq.backends.get("onnx")
    prepared = pq.prepare_pt2e(program, onnx.quantizer("int8").allowing("slower"))
    gm = pq.convert_pt2e(pq.calibrate(prepared, [(x,)], progress=False))
    gm = in_float(gm, {"linear": "slower", "linear_1": "slower"})
    artifact = onnx.lower(gm)  # strict: a weight that is dequantized in calls is refused
    assert not {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"} & set(artifact.report.integer_ops)
    torch.testing.assert_close(artifact.run(x), gm(x), rtol=0, atol=1e-5)


class SharedLayer(nn.Module):
    """A layer without a bias that runs twice, with a relu that no quantize takes over."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(torch.relu(self.layer(x)))).transpose(1, 2)


def test_product_when_its_weight_is_shared_and_a_relu_follows_then_in_integers() -> None:
    model, x = SharedLayer(), torch.randn(1, 96, 64, generator=torch.Generator().manual_seed(0))
    artifact = quantized(model, x)
    assert sum(artifact.report.integer_ops.values()) == 2
    assert sqnr_db([model(x).detach()], [artifact.run(x)]) > 30
