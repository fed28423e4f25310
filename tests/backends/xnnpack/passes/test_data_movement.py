import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.passes.data_movement import clip_before_pools
from pt2e_quant.graph.editor import Editor

Q = torch.ops.quantized_decomposed
MOVES = {
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "reshape": lambda x: x.reshape(x.shape[0], -1),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "slice": lambda x: x[:, 1:3],
    "pad": lambda x: F.pad(x, (1, 1)),
    "pad that crops": lambda x: F.pad(x, (-1, 2, 0, -3)),
    "pad that only crops": lambda x: F.pad(x, (-1, -2, -1, 0)),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "expand": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "flip": lambda x: x.flip(1),
}


def rounded(x, scale, zero_point):
    qparams = (scale, zero_point, -128, 127, torch.int8)
    return Q.dequantize_per_tensor(Q.quantize_per_tensor(x, *qparams), *qparams)


def test_pad_when_negative_in_float_then_cropped():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x):
            return self.linear(x), F.pad(x, (-1, 1, 2, -1), value=0.5)

    torch.manual_seed(0)
    x = torch.randn(4, 6, 5)
    artifact = pq.quantize(
        Model(), (x,), dynamic_shapes=({0: Dim("batch", max=8)},), calibration_data=[(x,)],
        backend="xnnpack", progress=False,
    )  # fmt: skip
    for rows in (x, torch.randn(8, 6, 5), x[:1]):
        torch.testing.assert_close(artifact.run(rows)[1], F.pad(rows, (-1, 1, 2, -1), value=0.5))


class Moved(nn.Module):
    def __init__(self, move):
        super().__init__()
        self.move = move

    def forward(self, x):
        return rounded(self.move(rounded(x, 0.02, 0)), 0.013, 3)


@pytest.mark.parametrize("name", MOVES)
def test_mover_when_its_result_has_other_qparams_then_quantized_anew(name):
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    shapes = {"x": {0: Dim("batch", min=1, max=8)}}
    model = Moved(MOVES[name])
    gm = torch.export.export(model, (x,), dynamic_shapes=shapes).module()
    Editor(gm).erase_dead([n for n in gm.graph.nodes if n.op == "call_module"])
    artifact = BACKEND.lower(gm, (x,))
    assert not artifact.report.float_regions
    torch.testing.assert_close(artifact.run(x), model(x), rtol=0, atol=0.0131)


class Clipped(nn.Module):
    """A max pool between tensors of equal qparams, and a clip with its own behind it."""

    def __init__(self, clip, pool=2, qparams=(0.013, -128)):
        super().__init__()
        self.clip, self.pool, self.qparams = clip, pool, qparams

    def forward(self, x):
        pooled = F.max_pool2d(rounded(x, 0.02, 0), self.pool, 2, self.pool // 3, ceil_mode=True)
        return rounded(self.clip(rounded(pooled, 0.02, 0)), *self.qparams)


CLIPS = {
    "relu": F.relu,
    "relu6": F.relu6,
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.4),
    "clamp": lambda x: x.clamp(max=0.2),
}


@pytest.mark.parametrize("pool", [2, 3])
@pytest.mark.parametrize("name", CLIPS)
def test_clip_when_behind_a_max_pool_with_other_qparams_then_requantized(name, pool):
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    model = Clipped(CLIPS[name], pool)
    gm = torch.export.export(model, (x,)).module()
    Editor(gm).erase_dead([n for n in gm.graph.nodes if n.op == "call_module"])
    artifact = BACKEND.lower(gm, (x,), verify=False)
    assert artifact.report.integer_ops["MaxPooling2d"] == 1
    torch.testing.assert_close(artifact.run(x), model(x), rtol=0, atol=0.0131)


def test_clip_when_its_qparams_are_the_pools_then_left_behind_it():
    x = torch.randn(2, 4, 8, 8)
    gm = torch.export.export(Clipped(F.relu, qparams=(0.02, 0)), (x,)).module()
    result = clip_before_pools(gm)
    assert not result.changed
    assert [n.text for n in result.notes] == ["both have the same qparams"]


def test_clip_when_the_pool_is_float_then_left_behind_it():
    class Model(nn.Module):
        def forward(self, x):
            return rounded(F.relu(rounded(F.max_pool2d(x, 2), 0.02, 0)), 0.013, -128)

    gm = torch.export.export(Model(), (torch.randn(2, 4, 8, 8),)).module()
    result = clip_before_pools(gm)
    assert not result.changed
    assert [n.text for n in result.notes] == ["one of them stays float"]
