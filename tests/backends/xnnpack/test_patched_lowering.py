"""ExecuTorch's passes with and without the patch: the same file, and nothing stays replaced."""

import pytest
import torch
import torch.nn.functional as F
from executorch.exir.pass_base import _ExportPassBase
from torch import Tensor, nn
from torch.fx import GraphModule

from pt2e_quant.accelerate import composite_operators, single_decomposition
from pt2e_quant.accelerate.executorch_passes import PATCH, fewer_interpretations
from pt2e_quant.accelerate.patch import VARIABLE, Patch
from pt2e_quant.backends.xnnpack import lower
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e


class Block(nn.Module):
    """What ExecuTorch's passes rewrite: 1-d convolutions, long cats, norms, attention, prelu."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6())
        self.depthwise = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Hardswish())
        self.up = nn.ConvTranspose2d(8, 8, 2)
        self.prelu = nn.PReLU(8)
        self.line = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.depthwise(x)
        x = torch.cat([self.prelu(self.up(x))[:, :, :-1, :-1], *[x] * 5], 1)[:, :8]
        x = self.norm(self.line(x.flatten(2)).transpose(1, 2))
        return self.head(F.scaled_dot_product_attention(x, x, x).mean(1))


@pytest.mark.parametrize(
    ("off", "dynamic"),
    [
        (PATCH.name, False),
        (PATCH.name, True),
        (composite_operators.PATCH.name, False),
        (single_decomposition.PATCH.name, True),
    ],
)
def test_fewer_interpretations_when_lowering_then_file_is_the_same(
    off,
    dynamic,
    quantize_with,
    make_noise,
    monkeypatch,  # type: ignore[no-untyped-def]
):
    if not PATCH.is_on():
        pytest.skip("another torch or ExecuTorch: nothing is replaced")
    inputs = (make_noise((2, 3, 8, 8)),)
    canonical = quantize_with(Block(), inputs, BACKEND.quantizer(), dynamic=dynamic)
    options = lower.Options(verify=False)
    quick = lower.LOWERING.lower(canonical, None, options).pte
    monkeypatch.setenv(VARIABLE, off)
    assert lower.LOWERING.lower(canonical, None, options).pte == quick


class Decoder(nn.Module):
    """What dynamic recipes rewrite: a tied table, norms, a gate, a cache that a call writes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 64)
        self.norm, self.q, self.k = nn.RMSNorm(64), nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.head = nn.Linear(64, 40, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("cache", torch.zeros(1, 8, 64))

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        keys = self.cache.index_copy_(1, positions, self.k(x))
        x = x + torch.softmax(self.q(x) @ keys.transpose(1, 2), -1) @ keys
        return self.head(F.silu(x))


@pytest.mark.parametrize(
    ("recipe", "off"),
    [
        ("int8_dynamic", PATCH.name),
        ("a8w4_g32", PATCH.name),
        ("int8_dynamic", single_decomposition.PATCH.name),
    ],
)
def test_fewer_interpretations_when_scales_are_dynamic_then_file_is_the_same(
    recipe,
    off,
    monkeypatch,  # type: ignore[no-untyped-def]
):
    if not PATCH.is_on():
        pytest.skip("another torch or ExecuTorch: nothing is replaced")
    tokens = torch.export.Dim("tokens", min=1, max=8)
    program = torch.export.export(
        Decoder().eval(),
        (torch.zeros(1, 3, dtype=torch.int64), torch.arange(3)),
        dynamic_shapes={"ids": {1: tokens}, "positions": {0: tokens}},
    )
    canonical = convert_pt2e(prepare_pt2e(program, BACKEND.quantizer(recipe)))
    options = lower.Options(verify=False)
    quick = lower.LOWERING.lower(canonical, None, options)
    weights = {op.inputs[1] for op in quick.contents().ops() if op.name == "FullyConnected"}
    assert ("qcint8" if recipe == "int8_dynamic" else "qbint4") in weights
    monkeypatch.setenv(VARIABLE, off)
    assert lower.LOWERING.lower(canonical, None, options).pte == quick.pte


def test_fewer_interpretations_when_left_then_nothing_is_replaced():  # type: ignore[no-untyped-def]
    before = _ExportPassBase.call, GraphModule.recompile, GraphModule.code, torch.fx.traceback.copy
    with pytest.raises(ZeroDivisionError), fewer_interpretations():
        _ = _ExportPassBase.call is before[0] or 1 / 0
    after = _ExportPassBase.call, GraphModule.recompile, GraphModule.code, torch.fx.traceback.copy
    assert after == before


def test_fewer_interpretations_when_version_is_unknown_then_nothing_is_replaced(monkeypatch):  # type: ignore[no-untyped-def]
    old = Patch(name=PATCH.name, saves="", versions={"torch": "0.1"})
    monkeypatch.setattr("pt2e_quant.accelerate.executorch_passes.PATCH", old)
    before = _ExportPassBase.call
    with fewer_interpretations():
        assert _ExportPassBase.call is before
