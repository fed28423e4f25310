"""Small floats, code books, MX and NVFP4 through quantizer, prepare and convert, on a toy table."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.blocks import WHOLE
from pt2e_quant.core.canonical import verify_canonical
from pt2e_quant.core.errors import AnnotationError, CalibrationError, ConfigError
from pt2e_quant.core.format_ops import DECOMPOSITIONS, is_choose_scales
from pt2e_quant.core.format_schemes import FORMAT_SCHEMES, code_book_scheme
from pt2e_quant.core.granularity import PerBlock, PerChannel, PerGroup, PerRow
from pt2e_quant.core.number_formats import CodeBook
from pt2e_quant.core.qdq import OWN_KINDS, QdqKind, is_dequantize, kind_of_qdq
from pt2e_quant.core.scale_format import ScaleFormat
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.scheme_size import stored_bytes
from pt2e_quant.core.schemes import Role, Scheme
from pt2e_quant.core.unpack_op import is_unpack
from pt2e_quant.flow.observer_choice import ObserverChoice
from pt2e_quant.flow.op_table import OpRow, OpTable, Slot
from pt2e_quant.flow.reexport import export_again
from pt2e_quant.flow.table_quantizer import TableQuantizer
from pt2e_quant.graph import ops
from pt2e_quant.graph.pattern import Op, Var
from pt2e_quant.observers.weight_search import WeightSearch

GROUPED = ["fp4_weight_only_g32", "nf4_g32", "w1_g32", "w1.58_g32", "lut3_g64"]
# The tables of lut7 and lut8 for each row of 128 weights would be greater than the weights.
NAMES = [*(name for name in FORMAT_SCHEMES if name not in ("lut7", "lut8")), *GROUPED]

# SQNR in dB of a million normal values under each kind of code; of tables of 2 to 16 values it is
# what Max ("Quantizing for Minimum Distortion", 1960) gives for their optimum.
ONE_TENSOR = {
    "fp8": 31.5,
    "fp8_e5m2": 25.5,
    "fp6": 30.9,
    "fp6_e3m2": 25.6,
    "fp4": 18.5,
    "mxfp8": 30.65,
    "mxfp8_e5m2": 25.4,
    "mxfp6": 30.9,
    "mxfp6_e3m2": 25.4,
    "mxfp4": 18.8,
    "nvfp4": 20.4,
    "nf4": 20.7,
    "w1": 4.4,
    "w1.58": 7.1,
    "lut1": 4.4,
    "lut2": 9.3,
    "lut3": 14.6,
    "lut4": 20.2,
    "lut5": 26.0,
    "lut6": 31.9,
    "lut7": 38.0,
    "lut8": 43.7,
}


def one_tensor(name):
    return ONE_TENSOR[max((key for key in ONE_TENSOR if name.startswith(key)), key=len)]


def floor_of(name, tensors=4):
    """What is left where so many quantized tensors add their noise, less 1.5 dB."""
    count = tensors if scheme_named(name).input is not None else max(1, tensors // 2)
    return one_tensor(name) - 10 * math.log10(count) - 1.5


def row_of(scheme: Scheme, name, find, axis=None) -> OpRow:
    weight = scheme.weight
    if axis is not None and isinstance(weight.granularity, PerGroup):
        weight = replace(weight, granularity=replace(weight.granularity, axis=axis))
    slots = (
        Slot(at="x", role=Role.INPUT, accepts=(scheme.input,) if scheme.input else ()),
        Slot(at="w", role=Role.WEIGHT, accepts=(weight,)),
    )
    return OpRow(name=name, find=(find,), slots=slots, lowers_to="toy")


def quantizer_of(scheme, search=WeightSearch.MIN_MAX) -> TableQuantizer:
    only_weight = replace(scheme, input=None)
    rows = (
        row_of(scheme, "linear", Op(ops.LINEAR, Var("x"), Var("w"))),
        row_of(only_weight, "embedding", Op(ops.EMBEDDING, Var("w"), Var("i"))),
    )
    table = OpTable(
        backend="Toy",
        rows=(rows[0], replace(rows[1], slots=rows[1].slots[1:])),
    )
    return TableQuantizer(table, scheme, observers=ObserverChoice(search=search))


def model_and_input():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64)).eval()
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.weight, std=0.1)
    return model, (torch.randn(3, 5, 128),)


def converted(scheme, search=WeightSearch.MIN_MAX, *, model=None, inputs=None, **options):
    scheme = scheme_named(scheme) if isinstance(scheme, str) else scheme
    if model is None:
        model, inputs = model_and_input()
    dims = ({0: torch.export.Dim("n", max=64)},)
    program = torch.export.export(model, inputs, dynamic_shapes=dims)
    prepared = pq.prepare_pt2e(program, quantizer_of(scheme, search))
    if scheme.input is not None and not scheme.input.is_dynamic:
        pq.calibrate(prepared, [(torch.randn(8, 5, 128),)])
    return model, pq.convert_pt2e(prepared, **options)


def sqnr(reference, value):
    return 10 * torch.log10(reference.square().sum() / (reference - value).square().sum()).item()


@pytest.mark.parametrize("name", NAMES)
def test_scheme_when_converted_then_canonical_near_float_and_exports(name):
    model, quantized = converted(name)
    other = torch.randn(7, 5, 128)
    assert sqnr(model(other), quantized(other)) > floor_of(name)
    kinds = [kind_of_qdq(n) for n in quantized.graph.nodes if is_dequantize(n)]
    if not name.startswith("w1.58"):
        assert set(kinds) <= OWN_KINDS
    again = export_again(quantized).module(check_guards=False)
    verify_canonical(again)
    assert torch.equal(again(other), quantized(other))
    assert again(torch.randn(2, 5, 128)).shape == (2, 5, 64)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "nf4_double", "lut3", "w1", "fp8_blocks"])
def test_converted_when_written_out_in_aten_then_the_same_bits(name):
    _, quantized = converted(name, pack=False)
    table = torch.export.default_decompositions()
    table.update(DECOMPOSITIONS)
    written = export_again(quantized).run_decompositions(table)
    called = {n.target for n in written.graph.nodes if n.op == "call_function"}
    assert not [t for t in called if getattr(t, "namespace", "") == "pt2e_quant"]
    other = torch.randn(7, 5, 128)
    # `linear` becomes addmm on another layout, which may add in another order.
    torch.testing.assert_close(written.module()(other), quantized(other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_scheme_when_packed_then_the_bits_of_its_codes_and_the_same_values(name):
    _, plain = converted(name, pack=False)
    _, packed = converted(name)
    other = torch.randn(2, 5, 128)
    assert torch.equal(plain(other), packed(other))
    scheme = scheme_named(name).weight
    buffers = dict(packed.named_buffers())
    codes = next(b for n, b in buffers.items() if n.startswith("0.weight_q"))
    assert codes.numel() * codes.element_size() * 8 == 256 * 128 * scheme.bits
    unpacked = [n for n in packed.graph.nodes if is_unpack(n)]
    assert bool(unpacked) == (scheme.bits < 8)
    record = pq.provenance_of(packed).tensor("0.weight")
    of_weight = [b for n, b in buffers.items() if n.startswith("0.weight_")]
    assert record.size_after == sum(b.numel() * b.element_size() for b in of_weight)
    assert record.size_before == 256 * 128 * 4


@pytest.mark.parametrize("name", ["fp4_weight_only", "mxfp4_weight_only", "nvfp4_weight_only"])
def test_weights_when_searched_then_less_error_than_by_the_greatest(name):
    model, _ = model_and_input()
    errors = {}
    for search in (WeightSearch.MIN_MAX, WeightSearch.MSE):
        _, quantized = converted(name, search)
        node = next(n for n in quantized.graph.nodes if is_dequantize(n))
        errors[search] = (dequantized(quantized, node) - model[0].weight).square().mean()
    assert errors[WeightSearch.MSE] < 0.95 * errors[WeightSearch.MIN_MAX]


def dequantized(gm, node):
    """What a node of constants comes to."""

    def value(x):
        if not isinstance(x, torch.fx.Node):
            return x
        if x.op == "get_attr":
            return gm.get_buffer(x.target)
        return x.target(*[value(a) for a in x.args], **x.kwargs)

    return value(node)


def test_formats_when_on_normal_weights_then_in_the_order_that_papers_give():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(1024, 512, bias=False)).eval()
    nn.init.normal_(model[0].weight)
    inputs = (torch.randn(2, 1024),)
    found = {}
    for name in ("w4_g64", "nf4", "nf4_double", "mxfp4_weight_only", "nvfp4_weight_only", "lut4"):
        _, quantized = converted(name, model=model, inputs=inputs)
        node = [n for n in quantized.graph.nodes if is_dequantize(n)][-1]
        found[name] = sqnr(model[0].weight, dequantized(quantized, node))
    # QLoRA, table 2: NF4 before Int4; double quantization costs nothing that can be measured.
    assert found["nf4"] > found["w4_g64"] + 0.5
    assert abs(found["nf4_double"] - found["nf4"]) < 0.1
    # NVFP4's finer blocks and scales: 2 dB or so before MXFP4.
    assert found["nvfp4_weight_only"] > found["mxfp4_weight_only"] + 1.0
    # 16 values of least error for a normal distribution: 20.22 dB (Max, 1960, table I).
    assert abs(found["lut4"] - 20.22) < 0.3


def test_dynamic_when_converted_then_scales_are_found_in_the_graph():
    _, quantized = converted("nvfp4")
    chosen = [n for n in quantized.graph.nodes if is_choose_scales(n)]
    assert len(chosen) == 4  # of the tensor, then of blocks in its units; at two linears
    assert all(n.args[2] == [1, 1, 16] for n in chosen[1::2])
    record = pq.provenance_of(quantized).tensor("input_1")
    assert (record.dtype, record.is_dynamic) == ("float4_e2m1fn", True)


def test_records_when_of_blocks_then_say_them():
    _, quantized = converted("fp8_blocks")
    record = pq.provenance_of(quantized).tensor("0.weight")
    assert (record.dtype, record.block, record.scales) == ("float8_e4m3fn", [128, 128], "")
    _, doubled = converted("nf4_double")
    record = pq.provenance_of(doubled).tensor("0.weight")
    assert record.scales == "float32 double-quantized by 256 scales"
    text = pq.provenance_of(doubled).to_json()
    assert type(pq.provenance_of(doubled)).from_json(text) == pq.provenance_of(doubled)


def test_static_when_no_data_came_then_refused():
    model, inputs = model_and_input()
    scheme = scheme_named("fp8")
    prepared = pq.prepare_pt2e(torch.export.export(model, inputs), quantizer_of(scheme))
    with pytest.raises(CalibrationError, match="saw no data"):
        pq.convert_pt2e(prepared)


def test_unfolded_when_scales_are_doubled_then_the_same_values():
    _, folded = converted("nf4_double")
    _, unfolded = converted("nf4_double", fold_quantize=False)
    other = torch.randn(2, 5, 128)
    assert torch.equal(folded(other), unfolded(other))


SCALES = [
    ScaleFormat(dtype=torch.float16),
    ScaleFormat(dtype=torch.bfloat16),
    ScaleFormat(dtype=torch.float8_e8m0fnu),
    ScaleFormat(double_group=256),
    ScaleFormat(is_power_of_two=True),
]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("scales", SCALES, ids=str)
@pytest.mark.parametrize("name", ["w4_g32", "w8", "a8w4_g32", "int8_dynamic"])
def test_integers_when_scales_are_of_another_form_then_kept_so_and_near(name, scales, symmetric):
    scheme = scheme_named(name, symmetric=symmetric, scales=scales)
    model, quantized = converted(scheme)
    other = torch.randn(7, 5, 128)
    # A power of two is up to twice the scale: 6 dB, at each of two linears.
    floor = {4: 11, 8: 33}[scheme.weight.bits]
    assert sqnr(model(other), quantized(other)) > floor
    held = {n: b for n, b in quantized.named_buffers() if n.startswith("0.weight_scale")}
    if scales.double_group:
        assert held["0.weight_scale_codes"].dtype is torch.uint8
    else:
        assert held["0.weight_scale"].dtype is scales.dtype
    if scales.is_power_of_two:
        mantissa, _ = torch.frexp(held["0.weight_scale"])
        assert bool((mantissa == 0.5).all())
        own = [n for n in quantized.graph.nodes if kind_of_qdq(n) in OWN_KINDS]
        assert not own


def test_power_of_two_when_static_activations_then_every_scale_is_one():
    scheme = scheme_named("a16w8", scales=ScaleFormat(is_power_of_two=True))
    raised = replace(scheme.input, scales=ScaleFormat(is_power_of_two=True))
    scheme = replace(scheme, input=raised, output=None)
    model, inputs = model_and_input()
    prepared = pq.prepare_pt2e(torch.export.export(model, inputs), quantizer_of(scheme))
    pq.calibrate(prepared, [inputs])
    quantized = pq.convert_pt2e(prepared)
    for record in pq.provenance_of(quantized).tensors:
        assert all(torch.frexp(torch.tensor(s)).mantissa == 0.5 for s in record.scale)
    assert sqnr(model(*inputs), quantized(*inputs)) > 35


def test_narrow_when_asked_then_the_least_integer_is_not_used():
    _, quantized = converted(scheme_named("w4_g32", narrow=True))
    node = next(n for n in quantized.graph.nodes if is_dequantize(n))
    assert node.args[3:5] == (-7, 7)
    with pytest.raises(ConfigError, match="no narrow range"):
        scheme_named("nf4", narrow=True)


def test_own_table_when_given_then_codes_of_it():
    book = CodeBook(name="halves", bits=2, values=(-1.0, -0.5, 0.5, 1.0))
    model, quantized = converted(code_book_scheme(book, PerGroup(32)), WeightSearch.MSE)
    other = torch.randn(7, 5, 128)
    # The optimum of four values, 9.3 dB, at two linears; this table is not it.
    assert sqnr(model(other), quantized(other)) > 5
    assert dict(quantized.named_buffers())["0.weight_table"].tolist() == list(book.values)


def test_own_table_when_fitted_in_half_precision_then_kept_so():
    book = CodeBook(name="own", bits=3)
    scheme = code_book_scheme(book, PerChannel(0), scales=ScaleFormat(dtype=torch.float16))
    _, quantized = converted(scheme)
    table = dict(quantized.named_buffers())["0.weight_table"]
    assert (table.dtype, tuple(table.shape)) == (torch.float16, (256, 1, 8))


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


def test_users_tensors_when_converted_then_untouched():
    model, inputs = model_and_input()
    before = copy.deepcopy(model.state_dict())
    for name in ("mxfp4", "lut4", "nf4_double"):
        converted(name, model=model, inputs=inputs)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_blocks_when_ragged_then_the_last_ones_are_shorter():
    torch.manual_seed(6)
    model = nn.Sequential(nn.Linear(200, 150)).eval()
    scheme = replace(scheme_named("fp8_blocks"), input=None)
    _, quantized = converted(scheme, model=model, inputs=(torch.randn(2, 200),))
    assert dict(quantized.named_buffers())["0.weight_scale"].shape == (2, 2)
    x = torch.randn(2, 200)
    assert sqnr(model(x), quantized(x)) > 27


def test_code_books_when_blocks_are_ragged_then_refused():
    model = nn.Sequential(nn.Linear(200, 150)).eval()
    book = CodeBook(name="own", bits=2)
    scheme = code_book_scheme(book, PerBlock((64, 64)))
    with pytest.raises(ConfigError, match="do not divide a weight"):
        converted(scheme, model=model, inputs=(torch.randn(2, 200),))


def test_kinds_when_of_our_own_then_named():
    _, quantized = converted("mxfp4_weight_only")
    kinds = [kind_of_qdq(n) for n in quantized.graph.nodes if is_dequantize(n)]
    assert kinds == [QdqKind.FLOAT, QdqKind.FLOAT]


@pytest.mark.parametrize(
    "name",
    [
        *("mxfp4", "nvfp4", "nf4", "nf4_double", "w1", "w1.58", "w1.58_g32", "lut3", "fp8"),
        *("fp8_blocks", "lut4_per_tensor", "fp6_weight_only", "w8", "w4", "w3_g32", "w8_g32"),
    ],
)
def test_size_when_computed_then_the_bytes_that_are_stored(name):
    _, quantized = converted(name)
    held = [b for n, b in quantized.named_buffers() if n.startswith("0.weight_")]
    found = sum(b.numel() * b.element_size() for b in held)
    assert stored_bytes(scheme_named(name).weight, (256, 128)) == found


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "nf4_double", "fp8", "w1"])
def test_programs_when_saved_then_loaded_alike_prepared_and_converted(name, tmp_path):
    model, inputs = model_and_input()
    program = torch.export.export(model, inputs)
    prepared = pq.prepare_pt2e(program, quantizer_of(scheme_named(name)))
    pq.calibrate(prepared, [inputs])
    pq.save(prepared, tmp_path / "prepared")
    quantized = pq.convert_pt2e(prepared)
    pq.save(quantized, tmp_path / "converted")
    expected = quantized(*inputs)
    assert torch.equal(pq.convert_pt2e(pq.load(tmp_path / "prepared"))(*inputs), expected)
    assert torch.equal(pq.load(tmp_path / "converted")(*inputs), expected)
