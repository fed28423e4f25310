"""Format schemes of embeddings, convolutions, attention products and tied weights."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from toy_formats import floor_of, quantizer_of, row_of, sqnr

import pt2e_quant as pq
from pt2e_quant.core.errors import AnnotationError
from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.core.granularity import PerGroup, PerRow
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import Role
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import OpRow, OpTable, Slot
from pt2e_quant.graph.pattern import Op, Var


@pytest.mark.parametrize("name", ["fp8_weight_only", "nf4", "mxfp6_weight_only", "lut4", "w1"])
def test_embedding_when_quantized_then_rows_are_looked_up_near_float(name):
    torch.manual_seed(1)
    model = nn.Embedding(100, 64).eval()
    program = torch.export.export(model, (torch.tensor([[3, 99]]),))
    quantized = pq.convert_pt2e(pq.prepare_pt2e(program, quantizer_of(scheme_named(name))))
    rows = torch.arange(100)[None]
    found = torch.cat([quantized(rows[:, i : i + 2]) for i in range(0, 100, 2)], 1)
    assert sqnr(model(rows), found) > floor_of(name, tensors=1)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(64, 32, 3, padding=1)

    def forward(self, x):
        return self.conv(x)


def conv_quantizer(scheme):
    row = row_of(scheme, "conv2d", Op(ops.CONV2D, Var("x"), Var("w")), axis=1)
    return TableQuantizer(OpTable(backend="Toy", rows=(row,)), scheme)


@pytest.mark.parametrize(
    "name", ["fp8_weight_only", "fp8", "w4_g32", "nf4", "mxfp4_weight_only", "lut4", "w1.58"]
)
def test_conv_when_in_channels_or_groups_then_near_float(name):
    torch.manual_seed(2)
    model, x = ConvNet().eval(), torch.randn(2, 64, 8, 8)
    scheme = scheme_named(name)
    prepared = pq.prepare_pt2e(torch.export.export(model, (x,)), conv_quantizer(scheme))
    pq.calibrate(prepared, [(x,)])
    quantized = pq.convert_pt2e(prepared)
    floor = 18 if name == "w4_g32" else floor_of(name, tensors=2)
    assert sqnr(model(x), quantized(x)) > floor
    if isinstance(scheme.weight.granularity, PerGroup):
        record = pq.provenance_of(quantized).tensor("conv.weight")
        assert record.block == [1, scheme.weight.granularity.group_size, 1, 1]


def test_conv_when_groups_do_not_divide_its_inputs_then_refused():
    model = nn.Sequential(nn.Conv2d(48, 8, 3)).eval()
    program = torch.export.export(model, (torch.randn(1, 48, 8, 8),))
    with pytest.raises(AnnotationError, match="do not divide the 48 entries along axis 1"):
        pq.prepare_pt2e(program, conv_quantizer(scheme_named("w4_g32")))


class Attention(nn.Module):
    def forward(self, q, k, v):
        return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v


@pytest.mark.parametrize(
    "name", ["fp8_dynamic", "fp8_dynamic_per_tensor", "int8_dynamic_per_tensor"]
)
def test_attention_when_both_sides_are_dynamic_then_scales_run_along_what_is_summed(name):
    torch.manual_seed(4)
    scheme = scheme_named(name)
    right = scheme.input
    if name == "fp8_dynamic":
        right = replace(right, granularity=PerRow(-2))
    slots = (
        Slot(at="x", role=Role.INPUT, accepts=(scheme.input,)),
        Slot(at="y", role=Role.INPUT, accepts=(right,)),
    )
    find = (Op(ops.MATMUL, Var("x"), Var("y")),)
    row = OpRow(name="matmul", find=find, slots=slots, lowers_to="toy")
    quantizer = TableQuantizer(OpTable(backend="Toy", rows=(row,)), scheme)
    model, inputs = Attention().eval(), tuple(torch.randn(2, 4, 6, 16) for _ in range(3))
    quantized = pq.convert_pt2e(pq.prepare_pt2e(torch.export.export(model, inputs), quantizer))
    assert sqnr(model(*inputs), quantized(*inputs)) > 24
    both = [n for n in quantized.graph.nodes if is_dequantize(n)]
    assert len(both) == 4
    if name == "fp8_dynamic":
        assert [n.args[3] for n in both[:2]] == [[1, 1, 1, WHOLE], [1, 1, WHOLE, 1]]


def test_tied_weights_when_in_blocks_then_stored_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(96, 64)
            self.head = nn.Linear(64, 96, bias=False)
            self.head.weight = self.table.weight

        def forward(self, i):
            return self.head(self.table(i))

    torch.manual_seed(5)
    model = Tied().eval()
    program = torch.export.export(model, (torch.tensor([[1, 2, 3]]),))
    quantized = pq.convert_pt2e(pq.prepare_pt2e(program, quantizer_of(scheme_named("nf4"))))
    codes = [n for n, _ in quantized.named_buffers() if n.endswith("_q_packed")]
    assert len(codes) == 1
