"""Integers on scales of other forms, narrow ranges, and tables of one's own, through the flow."""

from dataclasses import replace

import pytest
import torch
from toy_formats import converted, model_and_input, quantizer_of, sqnr

import pt2e_quant as pq
from pt2e_quant.core.errors import AnnotationError, ConfigError
from pt2e_quant.core.formats.format_schemes import code_book_scheme
from pt2e_quant.core.formats.number_formats import CodeBook
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.granularity import PerChannel, PerGroup
from pt2e_quant.core.qdq import OWN_KINDS, is_dequantize, kind_of_qdq
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.observers.weights.weight_search import WeightSearch

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


@pytest.mark.parametrize("scales", SCALES, ids=str)
def test_scales_when_the_quantizer_keeps_them_so_then_a_row_of_float32_ones_takes_them(scales):
    model, inputs = model_and_input()
    program = torch.export.export(model, inputs)
    quantizer = quantizer_of(scheme_named("w4_g32")).with_scales(scales)
    quantized = pq.convert_pt2e(pq.prepare_pt2e(program, quantizer))
    _, said = converted(scheme_named("w4_g32", scales=scales))
    held = dict(said.named_buffers())
    for name, value in quantized.named_buffers():
        assert value.dtype == held[name].dtype
        assert torch.equal(value.to(torch.float32), held[name].to(torch.float32)), name


def test_scales_when_codes_are_no_integers_then_those_of_their_scheme():
    model, inputs = model_and_input()
    program = torch.export.export(model, inputs)
    quantizer = quantizer_of(scheme_named("nf4")).with_scales(ScaleFormat(dtype=torch.float16))
    quantized = pq.convert_pt2e(pq.prepare_pt2e(program, quantizer))
    assert dict(quantized.named_buffers())["0.weight_scale"].dtype == torch.float32


def test_scales_when_training_is_asked_for_then_refused():
    model, inputs = model_and_input()
    quantizer = quantizer_of(scheme_named("w4")).with_scales(ScaleFormat(dtype=torch.float16))
    with pytest.raises(AnnotationError, match="quantize nothing in training"):
        pq.prepare_qat_pt2e(torch.export.export(model, inputs), quantizer)


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
