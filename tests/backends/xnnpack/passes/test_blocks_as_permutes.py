"""Strided slices that are joined are a permute of blocks, others stay."""

from itertools import permutations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.export import Dim

import pt2e_quant as pq
from pt2e_quant.backends.xnnpack.passes.blocks_as_permutes import blocks_as_permutes
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.graph.pipeline import run_passes
from tests.backends.call_saved import call_pte
from tests.call_function import Call

X = torch.randn(2, 6, 4, 8, generator=torch.Generator().manual_seed(0))


def blocks(x, steps, dim):
    """A cat of all strided slices, of the slowest dimension first."""
    parts = []
    for offsets in product(*(range(step) for step in steps.values())):
        part = x
        for (d, step), offset in zip(steps.items(), offsets, strict=True):
            part = part[(slice(None),) * d + (slice(offset, None, step),)]
        parts.append(part)
    return torch.cat(parts, dim)


def graph_of(function, x=X, dynamic_shapes=None):
    gm = torch.export.export(Call(function), (x,), dynamic_shapes=dynamic_shapes).module()
    (record,) = run_passes(gm, (blocks_as_permutes,))
    return gm, record


def targets(gm):
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


ORDERS = [order for count in (1, 2, 3) for order in permutations(range(4), count)]


@given(st.sampled_from(ORDERS), st.lists(st.integers(2, 3), min_size=3, max_size=3), st.data())
def test_slices_when_of_all_offsets_then_one_permute(order, sizes, data):
    dim = data.draw(st.sampled_from([d for d in range(4) if d not in order]))
    steps = dict(zip(order, sizes, strict=False))
    x = torch.randn([steps.get(d, 1) * data.draw(st.integers(1, 3)) for d in range(4)])
    gm, _ = graph_of(lambda x: blocks(x, steps, dim), x)
    aten = torch.ops.aten
    expected = [aten.reshape.default, aten.permute.default, aten.reshape.default]
    assert targets(gm) == expected
    torch.testing.assert_close(gm(x), blocks(x, steps, dim), rtol=0, atol=0)


OTHERS = {
    "an offset is missing": lambda x: torch.cat([x[:, :, ::2], x[:, :, ::2]], 1),
    "another order": lambda x: torch.cat([x[:, :, 1::2], x[:, :, ::2]], 1),
    "of two tensors": lambda x: torch.cat([x[:, :, ::2], (x + 1)[:, :, 1::2]], 1),
    "cut": lambda x: torch.cat([x[:, :, :2:2], x[:, :, 1:3:2]], 1),
    "along their own dimension": lambda x: torch.cat([x[:, :, ::2], x[:, :, 1::2]], 2),
    "of odd size": lambda x: torch.cat([x[:, :, :3][:, :, ::2], x[:, :, 1::2]], 1),
    "halves": lambda x: torch.cat([x[:, :, :2], x[:, :, 2:]], 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_slices_when_they_are_no_blocks_then_they_stay(name):
    gm, record = graph_of(OTHERS[name])
    assert not record.changed
    torch.testing.assert_close(gm(X), OTHERS[name](X), rtol=0, atol=0)


def test_slices_when_of_a_crop_then_a_permute_of_the_crop():
    def shifted(x):
        return blocks(x[..., 1:7], {3: 3, 2: 2}, 1)

    gm, record = graph_of(shifted)
    assert record.changed
    torch.testing.assert_close(gm(X), shifted(X), rtol=0, atol=0)


def test_slices_when_one_size_is_dynamic_then_a_permute_at_each():
    def focus(x):
        return blocks(x, {3: 2, 2: 2}, 1)

    gm, record = graph_of(focus, dynamic_shapes=({0: Dim("batch", min=1, max=9)},))
    assert record.changed
    for count in (1, 5):
        x = torch.randn(count, 6, 4, 8)
        torch.testing.assert_close(gm(x), focus(x), rtol=0, atol=0)
    sizes = {0: Dim("batch", min=1, max=9), 2: 2 * Dim("rows", min=1, max=9)}
    gm, record = graph_of(focus, dynamic_shapes=(sizes,))
    assert [(note.text, note.skipped) for note in record.notes] == [
        ("several sizes are dynamic", True)
    ]


class Merged(torch.nn.Module):
    """The first layer of a YOLO, and Swin's merged patches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = torch.nn.Conv2d(12, 8, 3, padding=1), torch.nn.Linear(32, 16)

    def forward(self, x):
        y = self.conv(blocks(x, {3: 2, 2: 2}, 1)).relu()
        return self.linear(blocks(y.permute(0, 2, 3, 1), {2: 2, 1: 2}, 3))


def test_blocks_when_lowered_then_no_strided_slice_is_left(integers_everywhere, tmp_path):
    pytest.importorskip("executorch", reason="the extra xnnpack is not installed")
    torch.manual_seed(0)
    model, batches = Merged().eval(), [(torch.randn(2, 3, 16, 24),) for _ in range(3)]
    shapes = ({0: Dim("batch", min=1, max=4)},)
    program = torch.export.export(model, batches[0], dynamic_shapes=shapes)
    artifact = pq.quantize(program, calibration_data=batches, backend="xnnpack", progress=False)
    assert not {name for name in artifact.contents().overloads if "slice" in name}
    calls = [(torch.randn(count, 3, 16, 24),) for count in (1, 4, 3)]
    again = call_pte(artifact, calls, tmp_path)
    for x, elsewhere in zip(calls, again, strict=True):
        found = artifact.run(*x)
        assert sqnr_db(model(*x), found) > 25
        torch.testing.assert_close(elsewhere, found, rtol=0, atol=0)
