"""Every row of the op table, lowered and run: its operator is there in integers, nothing is left.

Rows are lowered together, a group in one model, and asked about one by one.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import pt2e_quant as pq
from pt2e_quant.backends.onnx.code_rows import CODE_ROWS
from pt2e_quant.backends.onnx.low_bit_rows import LOW_BIT_ROWS
from pt2e_quant.backends.onnx.table import TABLE

C = 8
Branch = Callable[[Tensor, Tensor], Tensor]


def weight(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator) * 0.2


class Branches(nn.Module):
    """Two convolutions make integers of an image; each branch reads them and is an output."""

    def __init__(self, branches: dict[str, Branch]) -> None:
        super().__init__()
        self.branches = branches
        self.x = nn.Conv2d(3, C, 3, padding=1)
        self.y = nn.Conv2d(3, C, 3, padding=1)
        self.bias = nn.Parameter(weight(C))
        for rank in (1, 2, 3):
            self.register_parameter(f"kernel{rank}", nn.Parameter(weight(C, C, *[2] * rank)))
        self.square = nn.Parameter(weight(C, C))
        self.other = nn.Parameter(weight(C, C).flip(0))

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        x, y = self.x(image), self.y(image)
        return {name: self.run(name, x, y) for name in self.branches}

    def run(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        branch = self.branches[name]
        names = branch.__code__.co_varnames[: branch.__code__.co_argcount]
        values = {"x": x, "y": y, "m": self}
        return branch(*(values[n] for n in names))


def conv3d(x: Tensor, m: Any) -> Tensor:
    return F.conv3d(x.unsqueeze(2).expand(-1, -1, 2, -1, -1), m.kernel3, m.bias)


CONVS: dict[str, tuple[Branch, str]] = {
    "conv1d": (lambda x, m: F.conv1d(x.flatten(2), m.kernel1, m.bias), "QLinearConv"),
    "conv2d": (lambda x, m: F.conv2d(x, m.kernel2, m.bias, stride=2), "QLinearConv"),
    "conv2d grouped": (lambda x, m: F.conv2d(x, m.kernel2[:, :2], m.bias, groups=4), "QLinearConv"),
    "conv2d depthwise": (lambda x, m: F.conv2d(x, m.kernel2[:, :1], groups=C), "QLinearConv"),
    "conv3d": (conv3d, "QLinearConv"),
    "conv1d_clip": (lambda x, m: F.conv1d(x.flatten(2), m.kernel1).relu(), "QLinearConv"),
    "conv2d_clip": (lambda x, m: F.relu6(F.conv2d(x, m.kernel2, m.bias)), "QLinearConv"),
    "conv2d_clip hardtanh": (
        lambda x, m: F.hardtanh(F.conv2d(x, m.kernel2, padding=1)),
        "QLinearConv",
    ),
    "conv2d_clip clamp": (
        lambda x, m: F.conv2d(x, m.kernel2, dilation=2).clamp(-0.2, 0.3),
        "QLinearConv",
    ),
    "conv3d_clip": (lambda y, m: conv3d(y, m).relu(), "QLinearConv"),
}
LINEARS: dict[str, tuple[Branch, str]] = {
    "linear": (lambda x, m: F.linear(x.mean((2, 3)), m.square, m.bias), "QGemm"),
    "linear relu": (lambda x, m: F.linear(x.mean((2, 3)), m.square, m.bias).relu() * 2, "QGemm"),
    "linear no bias": (lambda x, m: F.linear(x.mean((2, 3)), m.square), "QGemm"),
    "linear 3-D": (
        lambda x, m: F.linear(x.flatten(2).transpose(1, 2), m.square, m.bias),
        "MatMulIntegerToFloat",
    ),
    "addmm": (lambda x, m: torch.addmm(m.bias, x.mean((2, 3)), m.square), "QGemm"),
    "mm": (
        lambda x, m: x.flatten(2).transpose(1, 2) @ m.other,
        "MatMulIntegerToFloat",
    ),
}
ARITHMETIC: dict[str, tuple[Branch, str]] = {
    "add": (lambda x, y: x + y, "QLinearAdd"),
    "add_clip": (lambda x, y: (y + x).relu(), "QLinearAdd"),
    "sub": (lambda x, y: x - y, "BitwiseNot"),
    "sub_clip": (lambda x, y: F.relu6(y - x), "BitwiseNot"),
    "mul": (lambda x, y: x * y, "QLinearMul"),
    "mul_clip": (lambda x, y: (y * x).clamp(min=-0.1), "QLinearMul"),
    "mul broadcast": (lambda x, y: x * y[:, :, 1:].mean((2, 3), keepdim=True), "QLinearMul"),
    "matmul": (lambda x, y: x @ y, "QLinearMatMul"),
    "matmul bmm": (lambda x, y: torch.bmm(x[:, 0], y[:, 1]), "QLinearMatMul"),
    "sigmoid": (lambda x: x.sigmoid(), "QLinearSigmoid"),
    "softmax": (lambda x: x.softmax(-1), "QLinearSoftmax"),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), "QLinearLeakyRelu"),
    "avg_pool1d": (lambda x: F.avg_pool1d(x.flatten(2), 2), "QLinearAveragePool"),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1), "QLinearAveragePool"),
    "avg_pool2d excl": (
        lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        "QLinearAveragePool",
    ),
    "adaptive_avg_pool": (lambda x: F.adaptive_avg_pool2d(x, 1), "QLinearGlobalAveragePool"),
    "mean": (lambda y: y.mean((2, 3)), "QLinearGlobalAveragePool"),
    "mean keepdim": (lambda x: x[:, 1:].mean((-1, -2), keepdim=True), "QLinearGlobalAveragePool"),
}
MOVING: dict[str, tuple[Branch, str]] = {
    "clip": (lambda x: x.relu(), "Clip"),
    "max_pool": (lambda x: F.max_pool2d(x, 2), "MaxPool"),
    "max_pool 1d": (lambda x: F.max_pool1d(x.flatten(2), 2), "MaxPool"),
    "amax": (lambda x: x.amax((2, 3)), "ReduceMax"),
    "amin": (lambda x: x.amin((2, 3)), "ReduceMin"),
    "reshape": (lambda x: x.flatten(1), "Reshape"),
    "unsqueeze": (lambda x: x.unsqueeze(1), "Unsqueeze"),
    "squeeze": (lambda x: x[:, :, :1].squeeze(2), "Squeeze"),
    "permute": (lambda x: x.permute(0, 2, 3, 1), "Transpose"),
    "expand": (lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1), "Expand"),
    "repeat": (lambda x: x.repeat(1, 2, 1, 1), "Tile"),
    "slice": (lambda x: x[:, 1:5, ::2], "Slice"),
    "slice of a chunk": (lambda x: x.chunk(2, 1)[0], "Slice"),
    "select": (lambda x: x[:, 3], "Gather"),
    "index_select": (lambda x: x.index_select(1, torch.tensor([0, 2])), "Gather"),
    "identity": (lambda x: x.clone(), "DequantizeLinear"),
    "pixel_shuffle": (lambda x: F.pixel_shuffle(x, 2), "DepthToSpace"),
    "flip": (lambda x: x.flip(3), "Slice"),
    "pad": (lambda x: F.pad(x, (1, 1, 2, 0)), "Pad"),
    "pad value": (lambda x: F.pad(x, (1, 1), value=0.25), "Pad"),
    "pad reflect": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), "Pad"),
    "upsample_nearest": (lambda x: F.interpolate(x, scale_factor=2.0), "Resize"),
    "cat": (lambda x, y: torch.cat([x, y], 1), "QLinearConcat"),
    "where": (lambda x, y: torch.where(torch.ones(1, dtype=torch.bool), x, y), "QLinearWhere"),
    "maximum": (lambda x, y: torch.maximum(x, y), "Max"),
    "minimum": (lambda x, y: torch.minimum(x, y), "Min"),
}
GROUPS = {"convs": CONVS, "linears": LINEARS, "arithmetic": ARITHMETIC, "moving": MOVING}


@cache
def lowered(group: str, is_dynamic: bool) -> tuple[Any, Any]:
    """(canonical graph, artifact) of a group, its batch dynamic or not."""
    torch.manual_seed(0)
    model = Branches({name: branch for name, (branch, _) in GROUPS[group].items()}).eval()
    images = [torch.randn(3, 3, 8, 8) for _ in range(2)]
    batch = torch.export.Dim("batch", min=1, max=64)
    shapes = {"image": {0: batch}} if is_dynamic else None
    ep = torch.export.export(model, (images[0],), dynamic_shapes=shapes)
    backend = pq.backends.get("onnx")
    prepared = pq.prepare_pt2e(ep, backend.quantizer())
    pq.calibrate(prepared, [(image,) for image in images], progress=False)
    quantized = pq.convert_pt2e(prepared)
    return quantized, backend.lower(quantized)


ALL = [(group, name) for group, rows in GROUPS.items() for name in rows]


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(("group", "name"), ALL)
def test_row_when_lowered_then_its_operator_runs_in_integers(
    group: str, name: str, is_dynamic: bool
) -> None:
    _, artifact = lowered(group, is_dynamic)
    expected = GROUPS[group][name][1]
    report = artifact.report
    assert report.float_regions == []
    found = report.integer_ops | {"DequantizeLinear": 1}
    assert any(op in (expected, f"Nhwc{expected}") for op in found), found
    row = name.split()[0]
    assert any(f"(row {row})" in record.rule for record in report.provenance.tensors)


@pytest.mark.parametrize("batch", [1, 3, 6])
@pytest.mark.parametrize("group", GROUPS)
def test_group_when_run_at_several_sizes_then_each_output_is_within_a_step(
    group: str, batch: int
) -> None:
    quantized, artifact = lowered(group, True)
    image = torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(batch))
    expected, found = quantized(image), artifact.run(image)
    steps = {r.name: r.scale[0] for r in artifact.report.provenance.tensors if r.scale}
    error_lsb = max(steps.values())
    for name in expected:
        assert found[name].shape == expected[name].shape
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1.01 * error_lsb)


@pytest.mark.parametrize("group", ["convs", "arithmetic", "moving"])
def test_group_when_lowered_then_no_operator_is_left_in_float(group: str) -> None:
    _, artifact = lowered(group, True)
    assert artifact.report.float_ops == {}


def test_embedding_when_lowered_then_rows_are_found_in_integers() -> None:
    class Embed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 64)
            self.linear = nn.Linear(64, 16)

        def forward(self, ids: Tensor) -> Tensor:
            return self.linear(self.table(ids))

    ids = torch.randint(0, 1000, (2, 5), generator=torch.Generator().manual_seed(0))
    shapes = {"ids": {0: torch.export.Dim("n", max=8), 1: torch.export.Dim("t", max=64)}}
    ep = torch.export.export(Embed().eval(), (ids,), dynamic_shapes=shapes)
    backend = pq.backends.get("onnx")
    prepared = pq.prepare_pt2e(ep, backend.quantizer())
    pq.calibrate(prepared, [(ids,)], progress=False)
    quantized = pq.convert_pt2e(prepared)
    artifact = backend.lower(quantized)
    assert artifact.report.float_regions == []
    assert artifact.report.integer_ops["Gather"] == 1
    assert artifact.size_bytes < 0.3 * artifact.report.float_size_bytes
    for shape in ((1, 3), (4, 9)):
        ids = torch.randint(0, 1000, shape)
        torch.testing.assert_close(artifact.run(ids), quantized(ids), rtol=1e-5, atol=1e-5)


def test_table_when_listed_then_every_row_is_proven_here() -> None:
    proven = {name.split()[0] for rows in GROUPS.values() for name in rows} | {"embedding"}
    elsewhere = {
        row.name for row in (*LOW_BIT_ROWS, *CODE_ROWS)
    }  # test_low_bit.py, test_formats.py
    elsewhere |= {"recurrent_layer"}  # tests/backends/test_recurrent.py
    assert {row.name for row in TABLE} == proven | elsewhere
