import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES
from pt2e_quant.core.qparams import QParams, dequantize
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import INT8_WEIGHT_ROWS, TensorScheme
from pt2e_quant.tensors.exporting import emit_values
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from pt2e_quant.tensors.values import (
    decode,
    empty_parts,
    encode,
    find_qparams,
    quantize_values,
    to_qparams,
)
from tests.needs_vnni import NEEDS_VNNI

INTEGERS = ("w2", "w3_g32", "w4", "w4_g32", "w5", "w8")
WEIGHTS = {name: scheme_named(name).weight for name in INTEGERS}
WEIGHTS |= {name: scheme.weight for name, scheme in FORMAT_SCHEMES.items()}
WEIGHTS |= {f"{n}_affine": scheme_named(n, symmetric=False).weight for n in ("w4", "w4_g32", "w8")}
WEIGHTS |= {
    "int8_rows": INT8_WEIGHT_ROWS,
    "int16": TensorScheme(dtype=torch.int16, granularity=pq.PerChannel(0), symmetric=True),
    "uint16": TensorScheme(dtype=torch.uint16, granularity=pq.PerTensor(), symmetric=False),
    "columns": TensorScheme(dtype=torch.int8, granularity=pq.PerChannel(1), symmetric=False),
    "squares": TensorScheme(dtype=torch.int8, granularity=pq.PerBlock((2, 32)), symmetric=True),
}


def values_of(seed=0, shape=(6, 128)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", WEIGHTS)
def test_values_when_of_any_scheme_then_decode_is_the_canonical_dequantize(name):
    tensor = QuantizedTensor.from_float(values_of(), WEIGHTS[name])
    assert torch.equal(tensor.dequantize(), emit_values(tensor.plain_parts(), tensor.form))
    # What is stored is quantized to itself, and its parts are those that a load prepares.
    again = encode(tensor.dequantize(), tensor.parts, tensor.form)
    same = torch.equal(decode(tensor.parts | {"codes": again}, tensor.form), tensor.dequantize())
    assert same
    empty = empty_parts(tensor.form, torch.device("cpu"))
    assert {n: (p.shape, p.dtype) for n, p in empty.items()} == {
        n: (p.shape, p.dtype) for n, p in tensor.parts.items()
    }


@pytest.mark.parametrize("name", ["w4_g32", "w8", "w4_affine"])
def test_qparams_when_parts_hold_them_then_they_come_back(name):
    values, scheme = values_of(), WEIGHTS[name]
    found = find_qparams(values, scheme)
    form = TensorForm(scheme=scheme, dtype=torch.float32, shape=tuple(values.shape))
    back = to_qparams(quantize_values(values, form, found), form)
    assert isinstance(found, QParams)
    assert isinstance(back, QParams)
    assert torch.equal(found.scale, back.scale)
    assert torch.equal(found.zero_point, back.zero_point)
    assert (found.axis, found.group_size) == (back.axis, back.group_size)


@NEEDS_VNNI
def test_values_when_the_graph_flow_quantizes_them_then_codes_are_equal():
    torch.manual_seed(0)
    model = nn.Linear(128, 6)
    program = torch.export.export(model, (torch.randn(2, 128),))
    quantizer = pq.backends.get("cpu").quantizer("w8")
    prepared = pq.prepare(program, quantizer.allowing("slower"))
    pq.calibrate(prepared, [torch.randn(2, 128)], progress=False)
    converted = pq.convert(prepared)
    tensor = QuantizedTensor.from_float(model.weight, scheme_named("w8").weight)
    assert torch.equal(converted.weight_q, tensor.codes)
    assert torch.equal(converted.weight_scale, tensor.scale.reshape(-1))


def test_values_when_per_row_integers_then_decode_is_that_of_qparams():
    values, scheme = values_of(3), WEIGHTS["int8_rows"]
    tensor = QuantizedTensor.from_float(values, scheme)
    expected = dequantize(tensor.codes, find_qparams(values, scheme))
    assert torch.equal(tensor.dequantize(), expected)


def test_values_when_not_finite_then_refused():
    with pytest.raises(pq.errors.CalibrationError, match="NaN or inf"):
        QuantizedTensor.from_float(torch.tensor([[1.0, torch.nan]]), WEIGHTS["w8"])
