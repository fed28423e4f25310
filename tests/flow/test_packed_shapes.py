"""Any scheme on a weight of any shape: packed and unpacked graphs compute the same bits."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule
from toy_formats import row_of

import pt2e_quant as pq
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import Scheme
from pt2e_quant.core.unpack_op import is_unpack
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import OpTable
from pt2e_quant.graph.pattern import Op, Var
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.weights.unpack_weights import unpack_weights

INTEGERS = st.builds("w{}{}".format, st.integers(2, 8), st.sampled_from(["", "_g2", "_g8", "_g16"]))
FORMATS = st.sampled_from([name for name, row in FORMAT_SCHEMES.items() if row.input is None])
SCALES = st.sampled_from(
    [
        None,
        ScaleFormat(dtype=torch.float16),
        ScaleFormat(dtype=torch.bfloat16),
        ScaleFormat(dtype=torch.float8_e8m0fnu),
        ScaleFormat(double_group=4),
        ScaleFormat(is_power_of_two=True),
    ]
)


@st.composite
def schemes(draw: st.DrawFn) -> Scheme:
    if draw(st.booleans()):
        return scheme_named(draw(FORMATS))
    symmetric = draw(st.booleans())
    options = {"symmetric": symmetric, "narrow": symmetric and draw(st.booleans())}
    return scheme_named(draw(INTEGERS), **options, scales=draw(SCALES))


def quantized(model: nn.Module, x: Tensor, scheme: Scheme, *, pack: bool) -> GraphModule:
    rows = (
        row_of(scheme, "linear", Op(ops.LINEAR, Var("x"), Var("w"))),
        row_of(scheme, "conv", Op(ops.CONV2D, Var("x"), Var("w"))),
    )
    quantizer = TableQuantizer(OpTable(backend="Toy", rows=rows), scheme)
    prepared = pq.prepare_pt2e(torch.export.export(model, (x,)), quantizer)
    return pq.convert_pt2e(prepared, pack=pack)


@settings(max_examples=20)
@given(
    scheme=schemes(),
    rows=st.integers(1, 9),
    columns=st.integers(1, 5).map(lambda n: 16 * n),
    kernel=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 1000),
)
def test_weights_when_packed_then_the_same_bits_and_undone(scheme, rows, columns, kernel, seed):
    torch.manual_seed(seed)
    size = getattr(scheme.weight.granularity, "group_size", 1)
    is_grouped = size > 1
    columns = -(-columns // size) * size
    if kernel and not is_grouped:  # groups run along the last axis, a kernel's width
        model: nn.Module = nn.Conv2d(columns // 16, rows, kernel).eval()
        x = torch.randn(1, columns // 16, 5, 4)
    else:
        model, x = nn.Linear(columns, rows).eval(), torch.randn(2, columns)
    plain = quantized(model, x, scheme, pack=False)
    packed = quantized(model, x, scheme, pack=True)
    expected = plain(x)
    assert torch.equal(packed(x), expected)
    # Zero points of 8-bit weights are packed too, where fewer bits hold them.
    assert any(is_unpack(n) for n in packed.graph.nodes) or scheme.weight.bits == 8
    run_passes(packed, (unpack_weights, drop_dead_constants), verify=True)
    assert torch.equal(packed(x), expected)
    stored = {k: v for k, v in plain.state_dict().items() if k.endswith("weight_q")}
    assert stored
    for name, value in stored.items():
        assert torch.equal(packed.state_dict()[name], value)
