import pytest
import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.export import Dim

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.backend import BACKEND
from pt2e_quant.backends.xnnpack.passes.data_movement import (
    clip_before_pools,
    requantize_before_joins,
)
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


JOINS = {"cat": lambda parts: torch.cat(parts, 1), "stack": lambda parts: torch.stack(parts, 1)}
QPARAMS = st.tuples(st.sampled_from((0.01, 0.02, 0.05)), st.integers(-60, 60))
SEVERAL = st.lists(QPARAMS, min_size=2, max_size=4)


class Joined(nn.Module):
    """Tensors that each have qparams of their own, joined, and quantized to others."""

    def __init__(self, join, parts, result):
        super().__init__()
        self.join, self.parts, self.result = join, parts, result

    def forward(self, x):
        parts = [rounded(x + float(i), *qparams) for i, qparams in enumerate(self.parts)]
        return rounded(self.join(parts), *self.result)


def joined(name, parts, result):
    x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    model = Joined(JOINS[name], parts, result)
    gm = torch.export.export(model, (x,)).module()
    Editor(gm).erase_dead([n for n in gm.graph.nodes if n.op == "call_module"])
    return gm, model, x


@settings(max_examples=6, deadline=None)
@given(
    name=st.sampled_from(list(JOINS)), parts=st.lists(QPARAMS, min_size=2, max_size=4), to=QPARAMS
)
def test_join_when_its_parts_have_other_qparams_then_requantized_in_integers(name, parts, to):
    gm, model, x = joined(name, parts, to)
    artifact = BACKEND.lower(gm, (x,), verify=False)
    assert not artifact.report.float_regions
    difference = (artifact.run(x) - model(x)).abs() / to[0]
    assert difference.max() < 1.01


def test_join_when_requantized_then_once_for_each_part_and_no_more():
    gm, model, x = joined("cat", ((0.02, 3), (0.01, 0)), (0.02, 3))
    expected = model(x)
    assert requantize_before_joins(gm).changed
    join = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.cat.default)
    assert {tuple(part.args[1:3]) for part in join.args[0]} == {(0.02, 3)}
    assert join.args[0][0].args[0].args[0].target is torch.ops.aten.add.Tensor  # as it was
    assert join.args[0][1].args[0].args[0].args[1:3] == (0.01, 0)
    assert not requantize_before_joins(gm).changed
    torch.testing.assert_close(gm(x), expected, rtol=0, atol=0)


def test_join_when_nothing_that_it_reads_is_integers_then_left():
    class Model(nn.Module):
        def forward(self, x):
            return rounded(torch.cat([x, -x], 1), 0.013, 3)

    gm = torch.export.export(Model(), (torch.randn(2, 4),)).module()
    assert not requantize_before_joins(gm).changed


def test_join_when_of_a_tensor_with_itself_then_in_the_delegate():
    class Model(nn.Module):
        def forward(self, x):
            x = rounded(x, 0.02, 3)
            return rounded(torch.cat([x, x, x], 1), 0.02, 3)

    x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    gm = torch.export.export(Model(), (x,)).module()
    Editor(gm).erase_dead([n for n in gm.graph.nodes if n.op == "call_module"])
    artifact = BACKEND.lower(gm, (x,))
    assert artifact.report.integer_ops["Concatenate3"] == 1
    assert not artifact.report.float_ops
    assert torch.equal(artifact.run(x), Model()(x))
