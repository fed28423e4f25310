"""Blocks of integers as torch's own operators."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.canonical import verify_canonical
from pt2e_quant.core.formats.format_ops import DequantizeBlock
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.granularity import PerBlock
from pt2e_quant.core.qdq import OWN_KINDS, QdqKind, is_dequantize, kind_of_qdq
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import Role
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import OpRow, OpTable, Slot
from pt2e_quant.graph.pattern import Op, Var
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.qdq.widen_scales import widen_scales
from pt2e_quant.passes.weights.pack_weights import pack_weights

SCALES = [
    ScaleFormat(dtype=torch.float16),
    ScaleFormat(dtype=torch.float8_e8m0fnu),
    ScaleFormat(double_group=256),
]


def converted(scheme):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48)).eval()
    row = OpRow(
        name="linear",
        find=(Op(ops.LINEAR, Var("x"), Var("w")),),
        slots=(Slot(at="w", role=Role.WEIGHT, accepts=(scheme.weight,)),),
        lowers_to="toy",
    )
    quantizer = TableQuantizer(OpTable(backend="Toy", rows=(row,)), scheme)
    program = torch.export.export(model, (torch.randn(2, 64),))
    return pq.convert_pt2e(pq.prepare_pt2e(program, quantizer))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("name", ["w4_g32", "w4", "w8", "w3_g16"])
def test_blocks_when_torch_can_say_them_then_the_same_bits_in_its_operators(
    name, scales, symmetric
):
    quantized = converted(scheme_named(name, scales=scales, symmetric=symmetric))
    x = torch.randn(2, 64)
    expected = quantized(x)
    (record, *_) = run_passes(quantized, (widen_scales, pack_weights, drop_dead_constants))
    assert record.changed
    assert torch.equal(quantized(x), expected)
    verify_canonical(quantized)
    kinds = [kind_of_qdq(n) for n in quantized.graph.nodes if is_dequantize(n)]
    assert kinds == [QdqKind.PER_CHANNEL_GROUP if "_g" in name else QdqKind.PER_CHANNEL]
    held = dict(quantized.named_buffers())
    assert not [n for n in held if n.endswith(("_codes", "_steps"))]


@pytest.mark.parametrize("name", ["nf4", "mxfp4_weight_only"])
def test_formats_when_no_integers_then_stay(name):
    quantized = converted(scheme_named(name))
    (record,) = run_passes(quantized, (widen_scales,))
    assert not record.changed


def test_blocks_when_of_two_axes_then_stay_with_the_reason():
    scheme = scheme_named("w8")
    squares = replace(scheme.weight, granularity=PerBlock((16, 16)))
    quantized = converted(replace(scheme, weight=squares))
    (record,) = run_passes(quantized, (widen_scales,))
    assert not record.changed
    assert "has blocks of [16, 16]" in record.notes[0].text
    assert {kind_of_qdq(n) for n in quantized.graph.nodes if is_dequantize(n)} <= OWN_KINDS


def test_pass_when_run_twice_then_nothing_more():
    quantized = converted(scheme_named("w4_g32", scales=SCALES[0]))
    run_passes(quantized, (widen_scales,))
    (record,) = run_passes(quantized, (widen_scales,))
    assert not record.changed


class Blocks(nn.Module):
    def __init__(self, zero_points):
        super().__init__()
        self.register_buffer("codes", torch.arange(-8, 8, dtype=torch.int8).reshape(2, 8))
        self.register_buffer("scales", torch.tensor([[0.5, 0.25], [1.0, 2.0]]).half())
        self.register_buffer("zero_points", torch.tensor(zero_points))

    def forward(self, x):
        weight = DequantizeBlock(
            self.codes, self.scales, self.zero_points, [1, 4], -8, 7, torch.int8
        )
        return nn.functional.linear(x, weight)


@pytest.mark.parametrize("whole", [True, False])
def test_zero_points_when_no_integers_then_stay(whole):
    zeros = [[1.0, -2.0], [3.0, 0.0 if whole else 0.5]]
    x = torch.randn(3, 8)
    quantized = torch.export.export(Blocks(zeros).eval(), (x,)).module(check_guards=False)
    expected = quantized(x)
    (record,) = run_passes(quantized, (widen_scales,))
    assert record.changed == whole
    assert record.notes[0].text == (
        "float32 scales" if whole else "its zero_points are no integers"
    )
    assert torch.equal(quantized(x), expected)
