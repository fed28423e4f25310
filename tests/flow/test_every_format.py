"""Small floats, code books, MX and NVFP4 through quantizer, prepare and convert, on a toy table."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from toy_formats import converted, dequantized, floor_of, model_and_input, quantizer_of, sqnr

import pt2e_quant as pq
from pt2e_quant.core.canonical import verify_canonical
from pt2e_quant.core.errors import AnnotationError, CalibrationError, ConfigError
from pt2e_quant.core.formats.format_ops import DECOMPOSITIONS, is_choose_scales
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES, code_book_scheme
from pt2e_quant.core.formats.number_formats import CodeBook
from pt2e_quant.core.granularity import PerBlock
from pt2e_quant.core.qdq import OWN_KINDS, QdqKind, is_dequantize, kind_of_qdq
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.scheme_size import stored_bytes
from pt2e_quant.core.unpack_op import is_unpack
from pt2e_quant.flow.reexport import export_again
from pt2e_quant.observers.weights.weight_search import WeightSearch

GROUPED = ["fp4_weight_only_g32", "nf4_g32", "w1_g32", "w1.58_g32", "lut3_g64"]
# The tables of lut7 and lut8 for each row of 128 weights would be greater than the weights.
NAMES = [*(name for name in FORMAT_SCHEMES if name not in ("lut7", "lut8")), *GROUPED]


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


@pytest.mark.parametrize("name", ["mxfp4", "nf4", "fp8", "fp8_dynamic"])
def test_training_when_asked_then_refused(name):
    model, inputs = model_and_input()
    program = torch.export.export(model, inputs)
    with pytest.raises(AnnotationError, match="quantize nothing in training"):
        pq.prepare_qat_pt2e(program, quantizer_of(scheme_named(name)))


@pytest.mark.parametrize("name", ["nvfp4", "nf4_double"])
def test_converted_when_compiled_then_the_same_bits(name):
    _, quantized = converted(name)
    x = torch.randn(3, 5, 128)
    with torch.no_grad():
        compiled = torch.compile(quantized, backend="aot_eager")
        assert torch.equal(compiled(x), quantized(x))
