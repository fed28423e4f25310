"""Whole models through the backend: what runs in integers, what does not, and what is said."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pt2e_quant.backends import gate
from pt2e_quant.backends.xnnpack import lower
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.core.errors import ArtifactError, UnsupportedError
from pt2e_quant.core.specs import QuantizationAnnotation, QuantizationSpec
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.graph.show import show
from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver

aten = torch.ops.aten


def settled(model: nn.Module, *shape: int) -> nn.Module:
    """Give batch norms statistics of their own."""
    model.train()
    with torch.no_grad():
        for i in range(3):
            model(torch.randn(*shape, generator=torch.Generator().manual_seed(i)))
    return model.eval()


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.features(x).flatten(1))}


class InvertedResidual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.body = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide),
            nn.ReLU6(inplace=True), nn.Conv2d(wide, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Encoder(nn.Module):
    """Embedding, one post-norm attention block with a padding mask, pooled."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(40, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        x = self.table(ids)
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.where(keep[:, None, None, :], 0.0, torch.finfo(torch.float32).min)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norm1(x + self.out(y.transpose(1, 2).reshape(batch, length, width)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


def test_cnn_when_lowered_then_all_in_integers_and_near_float(quantize_with, make_noise):  # type: ignore[no-untyped-def]
    model = settled(Cnn(), 16, 1, 8, 8)
    data = [(make_noise((4, 1, 8, 8), i),) for i in range(8)]
    canonical = quantize_with(model, data[0], BACKEND.quantizer(), dynamic=True, data=data)
    text = show(canonical)
    artifact = BACKEND.lower(canonical)
    assert show(canonical) == text

    x = make_noise((7, 1, 8, 8), 50)
    found = artifact.run(x)
    assert set(found) == {"logits"}
    assert sqnr_db(model(x), found) > 25
    assert artifact.report.integer_ops == {
        "Conv2d": 1, "DepthwiseConv2d": 1, "FullyConnected": 1, "MaxPooling2d": 2,
    }  # fmt: skip
    assert artifact.report.float_ops == {}
    assert len(artifact.contents().delegates) == 1
    assert artifact.report.sqnr_canonical_db is not None


def test_residual_when_relu6_then_every_conv_and_add_is_integer(quantize_with, make_noise):  # type: ignore[no-untyped-def]
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), InvertedResidual(8), InvertedResidual(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    settled(model, 8, 3, 12, 12)
    data = [(make_noise((2, 3, 12, 12), i),) for i in range(4)]
    canonical = quantize_with(model, data[0], BACKEND.quantizer(), data=data)
    artifact = BACKEND.lower(canonical)
    assert artifact.report.integer_ops == {
        "Add": 2, "Conv2d": 5, "DepthwiseConv2d": 2, "FullyConnected": 1,
    }  # fmt: skip
    assert artifact.report.float_ops == {"GlobalAvgPooling2d": 1}  # scales of run time behind it
    clamped = [o.clamp for o in artifact.contents().ops() if o.clamp]
    assert clamped == [(0.0, 6.0)] * 4


@pytest.mark.parametrize("portable_only", [False, True])
def test_encoder_when_lowered_then_linears_integer_norms_float(portable_only):  # type: ignore[no-untyped-def]
    torch.manual_seed(3)
    model = Encoder().eval()
    generator = torch.Generator().manual_seed(0)

    def batch(size: int, length: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, 40, (size, length), generator=generator)
        keep = torch.arange(length)[None] < torch.randint(2, length + 1, (size, 1))
        return ids, keep

    size, length = torch.export.Dim("size", min=1, max=8), torch.export.Dim("length", min=2, max=16)
    shapes = ({0: size, 1: length}, {0: size, 1: length})
    data = [batch(3, 9) for _ in range(6)]
    ep = torch.export.export(model, data[0], dynamic_shapes=shapes)
    prepared = prepare_pt2e(ep, BACKEND.quantizer())
    calibrate(prepared, data, progress=False)
    artifact = BACKEND.lower(convert_pt2e(prepared), portable_only=portable_only)

    for inputs in (batch(3, 9), batch(1, 4), batch(5, 16)):
        with torch.no_grad():
            assert sqnr_db(model(*inputs), artifact.run(*inputs)) > 20
    contents = artifact.contents()
    assert contents.integer_ops()["FullyConnected"] == 4
    assert contents.float_ops()["FullyConnected"] == 0
    assert not contents.undelegated_qdq()
    byte_kernel = "quantized_decomposed.embedding_byte"
    assert contents.kernels[byte_kernel] == (0 if portable_only else 1)
    assert contents.kernels["aten.embedding"] == (2 if portable_only else 0)
    assert any(byte_kernel.replace(".", "::") in n for n in artifact.report.notes) != portable_only
    # Adds that feed a norm are float, and say why.
    reasons = {r.reason for r in artifact.report.provenance.floats if r.op == "aten.add"}
    assert any("normalization" in reason for reason in reasons)


def test_attention_when_of_any_batch_then_no_copy_cuts_it(quantize_with, make_noise):  # type: ignore[no-untyped-def]
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(-1, 6, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
            y = F.scaled_dot_product_attention(q, k, v)
            return self.out(y.transpose(1, 2).reshape(-1, 6, 16))

    data = [(make_noise((2, 6, 16), i),) for i in range(4)]
    for dynamic in (False, True):
        canonical = quantize_with(
            Attention(), data[0], BACKEND.quantizer(), dynamic=dynamic, data=data
        )
        contents = BACKEND.lower(canonical).contents()
        assert contents.kernels == Counter()
        assert len(contents.delegates) == 1
        assert contents.integer_ops()["FullyConnected"] == 2
        assert contents.float_ops()["BatchMatrixMultiply"] == 2


class Annotator:
    """Somebody else's quantizer: it annotates linears as it is told."""

    def __init__(self, activation: torch.dtype | None, *, output: bool = True) -> None:
        self.activation, self.output = activation, output

    def transform_for_annotation(self, model):  # type: ignore[no-untyped-def]
        return model

    def annotate(self, model):  # type: ignore[no-untyped-def]
        weight = QuantizationSpec(
            torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, 0
        )
        act = self.activation and QuantizationSpec(
            self.activation, MinMaxObserver, qscheme=torch.per_tensor_affine
        )
        for node in model.graph.nodes:
            if node.target is aten.linear.default:
                x, w = node.args[:2]
                node.meta["quantization_annotation"] = QuantizationAnnotation(
                    {w: weight, **({x: act} if act else {})}, act if self.output else None
                )
        return model

    def validate(self, model):  # type: ignore[no-untyped-def]
        return None


@pytest.mark.parametrize(
    ("quantizer", "reason"),
    [
        (Annotator(torch.int8, output=False), "its output is not static int8"),
        (Annotator(torch.int16), "its input is not static int8"),
    ],
)
def test_foreign_annotation_when_delegate_lacks_it_then_refused_or_float(
    quantizer,
    reason,
    quantize_with,
    make_noise,  # type: ignore[no-untyped-def]
):
    inputs = (make_noise((3, 8)),)
    model = nn.Sequential(nn.Linear(8, 6), nn.Tanh())
    canonical = quantize_with(model, inputs, quantizer)
    with pytest.raises(UnsupportedError, match=reason):
        BACKEND.lower(canonical)
    artifact = BACKEND.lower(canonical, strict=False)
    assert any(reason in float_region.reason for float_region in artifact.report.float_regions)
    assert not artifact.contents().undelegated_qdq()
    assert sqnr_db(model(*inputs), artifact.run(*inputs)) > 30


def test_executorch_quantizer_when_used_then_lowers_as_well(quantize_with, make_noise):  # type: ignore[no-untyped-def]
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    quantizer = XNNPACKQuantizer().set_global(
        get_symmetric_quantization_config(is_per_channel=True)
    )
    model = settled(Cnn(), 16, 1, 8, 8)
    inputs = (make_noise((4, 1, 8, 8)),)
    artifact = BACKEND.lower(quantize_with(model, inputs, quantizer))
    ran = artifact.contents().integer_ops()
    assert ran["Conv2d"] + ran["DepthwiseConv2d"] == 2
    assert ran["FullyConnected"] == 1


def test_gate_when_artifact_is_off_then_refused(quantize_with, make_noise):  # type: ignore[no-untyped-def]
    inputs = (make_noise((3, 8)),)
    canonical = quantize_with(nn.Linear(8, 6), inputs, BACKEND.quantizer("int8_minmax"))
    artifact = lower.LOWERING.lower(canonical, None, lower.Options(verify=False))
    for name, value in canonical.named_buffers():
        if name.endswith("_q"):
            value.neg_()
    with pytest.raises(ArtifactError, match="differs from the canonical graph"):
        gate.check_artifact(artifact, canonical, gate.choose_sample(canonical, None), 6.0)
