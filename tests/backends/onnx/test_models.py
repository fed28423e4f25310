"""Whole models: every conv, linear and residual add in integers, sizes and quality as promised."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import pt2e_quant as pq
from benchmarks.inputs import image_batches
from benchmarks.models import mobilenet_v2, resnet18
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.passes.functions.table import FUNCTIONS

pytestmark = pytest.mark.usefixtures("integers_everywhere")


def lower(model: nn.Module, args: tuple[Any, ...], batches: list[Any], **export: Any) -> Any:
    ep = torch.export.export(model.eval(), args, **export)
    backend = pq.backends.get("onnx")
    prepared = pq.prepare_pt2e(ep, backend.quantizer("int8"))
    pq.calibrate(prepared, batches, progress=False)
    quantized = pq.convert_pt2e(prepared)
    # What runs in integers is not to depend on the machine that tests.
    return quantized, backend.lower(quantized, allow_slower=True)


def quality(model: nn.Module, run: Any, batches: list[Any]) -> float:
    with torch.no_grad():
        expected = [model(*b) for b in batches]
        found = [run(*b) for b in batches]
    return pq.sqnr_db(expected, found)


@pytest.mark.parametrize(("build", "convs", "adds"), [(resnet18, 20, 8), (mobilenet_v2, 52, 10)])
def test_cnn_when_lowered_then_everything_is_in_integers(build: Any, convs: int, adds: int) -> None:
    model = build(image=64)
    batches = image_batches(6, 64, seed=3)
    batch = torch.export.Dim("batch", min=1, max=8)
    example = (torch.zeros(2, 3, 64, 64),)
    quantized, artifact = lower(model, example, batches[:4], dynamic_shapes=({0: batch},))
    report = artifact.report
    assert report.integer_ops["QLinearConv"] == convs
    assert report.integer_ops["QLinearAdd"] == adds
    assert report.integer_ops["MatMulIntegerToFloat"] == 1
    # The head takes the scales of its rows at run time; the rest of its operators work on those.
    assert report.float_ops["GlobalAveragePool"] == 1
    assert not {"Conv", "MatMul", "Add", "Relu", "Clip"} & report.float_ops.keys()
    assert [region.what for region in report.float_regions] == [
        "DequantizeLinear for GlobalAveragePool"
    ]
    assert artifact.size_bytes < 0.272 * report.float_size_bytes
    lost = quality(model, quantized, batches[4:]) - quality(model, artifact.run, batches[4:])
    assert lost < 1.0  # dB: what lowering may cost on top of quantizing
    assert artifact.run(torch.randn(3, 3, 64, 64)).shape == (3, 1000)


class Block(nn.Module):
    """A transformer's block with a pre-norm and a fused q, k, v."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x))))


class Encoder(nn.Module):
    """Embeddings, two blocks, a head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(500, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x, attention_mask[:, None, None, :].bool())
        return {"hidden": self.norm(x), "scores": self.head(x[:, 0])}


def text(batch: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    mask[:, tokens - 2 :] = 0
    return torch.randint(0, 500, (batch, tokens), generator=generator), mask


def test_transformer_when_lowered_then_linears_alone_are_in_integers() -> None:
    torch.manual_seed(0)
    model = Encoder().eval()
    b, t = torch.export.Dim("b", min=1, max=16), torch.export.Dim("t", min=3, max=64)
    shapes = {"ids": {0: b, 1: t}, "attention_mask": {0: b, 1: t}}
    batches = [text(2, 12, seed) for seed in range(4)]
    _, artifact = lower(model, batches[0], batches, dynamic_shapes=shapes)
    report = artifact.report
    assert report.integer_ops["MatMulIntegerToFloat"] == 8
    assert report.integer_ops["QGemm"] == 1
    assert report.integer_ops["Gather"] == 2
    assert report.float_ops["LayerNormalization"] == 5
    assert "SkipLayerNormalization" not in report.float_ops
    assert not {"QLinearAdd", "QLinearMul"} & set(report.integer_ops)
    assert report.float_regions == []
    for shape in ((1, 5), (3, 40)):
        held_out = text(*shape, seed=9)
        with torch.no_grad():
            expected = model(*held_out)
        assert pq.sqnr_db(expected, artifact.run(*held_out)) > 28


def test_int8_graph_of_another_quantizer_when_lowered_then_it_fuses_as_uint8() -> None:
    pytest.importorskip("executorch", reason="the extra xnnpack is not installed")
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    ).eval()
    batch = torch.randn(2, 3, 12, 12)
    quantizer = XNNPACKQuantizer().set_global(
        get_symmetric_quantization_config(is_per_channel=True)
    )
    prepared = pq.prepare_pt2e(torch.export.export(model, (batch,)), quantizer)
    pq.calibrate(prepared, [(batch,)], progress=False)
    quantized = pq.convert_pt2e(prepared)
    artifact = pq.backends.get("onnx").lower(quantized)
    report = artifact.report
    assert report.integer_ops["QLinearConv"] == 2
    assert report.integer_ops["QGemm"] == 1
    assert report.float_ops == {}
    torch.testing.assert_close(artifact.run(batch), quantized(batch), rtol=0, atol=0.02)


class Branches(nn.Module):
    """A different linear on each side of a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: self.left(x), lambda x: self.right(x) * 2, (x,))


def test_control_flow_when_lowered_then_both_branches_are_in_integers() -> None:
    torch.manual_seed(0)
    batches = [(torch.randn(3, 16) + shift,) for shift in (-1.0, 1.0)]
    quantized, artifact = lower(Branches(), batches[0], batches)
    assert artifact.report.integer_ops["QGemm"] == 2
    for batch in batches:
        torch.testing.assert_close(artifact.run(*batch), quantized(*batch), rtol=0, atol=1e-4)


def test_half_precision_when_lowered_then_its_products_are_integers() -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 4).half()
    x = torch.randn(3, 16).half()
    backend = pq.backends.get("onnx")
    prepared = pq.prepare_pt2e(torch.export.export(model.eval(), (x,)), backend.quantizer())
    pq.calibrate(prepared, [(x,)], progress=False)
    quantized = pq.convert_pt2e(prepared)
    artifact = backend.lower(quantized)
    assert artifact.report.integer_ops["QGemm"] == 1
    assert artifact.run(x).dtype == torch.float16
    torch.testing.assert_close(artifact.run(x), model(x), rtol=0, atol=0.05)


class _Vanishing(nn.Module):
    """Empty in the middle at a size of 1: ONNX Runtime's ConvTranspose refuses that."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 1)
        self.up = nn.ConvTranspose1d(4, 4, 2, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.pad(self.up(self.conv(x)), (1, 1)).sum(-1)


@pytest.mark.slow
def test_artifact_when_it_stops_at_a_size_then_the_error_names_operator_and_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def left(*args: object, **kwargs: object) -> None:
        raise NotImplementedError

    # As ONNX Runtime takes it: a transposed convolution of this kind stops where it gives nothing.
    monkeypatch.setitem(FUNCTIONS, "aten.conv_transpose1d.default", left)
    x = torch.randn(2, 4, 3)
    size = torch.export.Dim("size", min=1, max=8)
    text = r"stops in call 2, with x \[2, 4, 1\]: .*ConvTranspose"
    with pytest.raises(ArtifactError, match=text) as raised:
        lower(_Vanishing(), (x,), [(x,)], dynamic_shapes=({2: size},))
    assert str(raised.value.node_name).startswith("conv_transpose1d")
    assert "min=" in str(raised.value.fix)
