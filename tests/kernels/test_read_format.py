"""Schemes and weights read from a graph are those that it was quantized with."""

from functools import cache

import pytest
import torch
from torch import nn

from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.granularity import PerChannel, PerGroup, PerToken
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import Role
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.graph.op_table import OpRow, OpTable, Slot
from pt2e_quant.graph.ops import LINEAR
from pt2e_quant.graph.pattern import Op, Var
from pt2e_quant.kernels.grouped_weight import read_grouped_weight
from pt2e_quant.kernels.read_scheme import scheme_of

HALF = ScaleFormat(dtype=torch.bfloat16)
NAMES = {
    "w4_g32": scheme_named("w4_g32"),
    "w4_g32, bfloat16 scales": scheme_named("w4_g32", scales=HALF),
    "w4_g32, affine": scheme_named("w4_g32", symmetric=False),
    "w4, bfloat16 scales": scheme_named("w4", scales=HALF),
    "a8w4_g32": scheme_named("a8w4_g32"),
    "fp8": scheme_named("fp8"),
    "fp8_dynamic": scheme_named("fp8_dynamic"),
    "fp8_dynamic_per_tensor": scheme_named("fp8_dynamic_per_tensor"),
    "mxfp8": scheme_named("mxfp8"),
}


@cache
def dequantized(name):
    """The graph of one linear, the dequantize of its input (None if float) and of its weight."""
    scheme = NAMES[name]
    slots = [Slot(at="w", role=Role.WEIGHT, accepts=(scheme.weight,))]
    inputs = () if scheme.input is None else (scheme.input,)
    slots.append(Slot(at="x", role=Role.INPUT, accepts=inputs))
    op = Op(LINEAR, Var("x"), Var("w"), Var("b"))
    row = OpRow(name="linear", find=(op,), slots=tuple(slots), lowers_to="toy")
    torch.manual_seed(0)
    model, x = nn.Linear(64, 8).eval(), torch.randn(3, 64)
    quantizer = TableQuantizer(OpTable(backend="Toy", rows=(row,)), scheme)
    prepared = prepare_pt2e(torch.export.export(model, (x,)), quantizer)
    prepared(x)
    gm = convert_pt2e(prepared)
    (call,) = (n for n in gm.graph.nodes if n.target is torch.ops.aten.linear.default)
    left, right = call.args[:2]
    return gm, left if is_dequantize(left) else None, right, model.weight.detach()


@pytest.mark.parametrize("name", NAMES)
def test_scheme_of_when_a_graph_is_read_then_gives_back_the_scheme(name):
    scheme = NAMES[name]
    gm, x, weight, _ = dequantized(name)
    # As text: a range that is the dtype's own may be given or not.
    assert str(scheme_of(gm, weight)) == str(scheme.weight)
    if scheme.input is None:
        assert x is None
    else:
        assert str(scheme_of(gm, x)) == str(scheme.input)


@pytest.mark.parametrize("name", [n for n in NAMES if "w4" in n])
def test_read_grouped_weight_when_a_graph_is_read_then_gives_back_the_weight(name):
    scheme = NAMES[name]
    gm, _, node, weight = dequantized(name)
    found = read_grouped_weight(gm, node)
    size = 64 if scheme.weight.granularity == PerChannel(0) else 32
    assert found.group_size == size
    assert found.scale.dtype is scheme.weight.scales.dtype
    assert (found.zero_point is None) == scheme.weight.symmetric
    steps = found.integers.float().view(8, -1, size)
    if found.zero_point is not None:
        steps = steps - found.zero_point.unsqueeze(-1)
    real = (steps * found.scale.float().unsqueeze(-1)).view(8, 64)
    step = found.scale.float().max()
    assert (real - weight).abs().max() <= step  # at most half a step, and a clamped end


def test_scheme_of_when_a_graph_has_groups_or_tokens_then_tells_them_apart():
    gm, x, weight, _ = dequantized("mxfp8")
    assert scheme_of(gm, weight).granularity == PerGroup(32)
    assert scheme_of(gm, x).granularity == PerGroup(32)
    gm, x, weight, _ = dequantized("fp8_dynamic")
    assert scheme_of(gm, weight).granularity == PerChannel(0)
    assert scheme_of(gm, x).granularity == PerToken()
