import copy
import io
import pickle

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.tensors import QuantizedTensor, fallbacks, forget_fallbacks, strict
from tests.needs_vnni import NEEDS_VNNI

PLACES = (
    ("w8", "plain"),
    ("w8", "onednn"),
    ("w4_g32", "packed"),
    ("mxfp4_weight_only", "packed"),
    ("nf4_double_g32", "plain"),
    ("fp8_weight_only", "plain"),
)


MARKED = [
    pytest.param(*place, marks=NEEDS_VNNI if place[1] == "onednn" else ()) for place in PLACES
]


def quantized(name="w8", layout="plain", shape=(16, 64), **named):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return QuantizedTensor.from_float(values, scheme_named(name).weight, layout=layout, **named)


@pytest.mark.parametrize(("name", "layout"), MARKED)
def test_tensor_when_pickled_by_weights_only_then_comes_back(name, layout):
    file = io.BytesIO()
    parameter = nn.Parameter(quantized(name, layout), requires_grad=False)
    torch.save(parameter, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert isinstance(found, QuantizedTensor)
    assert isinstance(found, nn.Parameter)
    assert torch.equal(found.dequantize(), parameter.dequantize())
    assert found.form.layout in ("plain", "packed")  # what any machine reads


@pytest.mark.parametrize(("name", "layout"), MARKED)
def test_tensor_when_copied_and_detached_then_stays_quantized(name, layout):
    tensor = quantized(name, layout)
    for made in (copy.deepcopy(tensor), tensor.clone(), tensor.detach(), tensor.data):
        assert isinstance(made, QuantizedTensor)
        assert made.form == tensor.form
        assert torch.equal(made.dequantize(), tensor.dequantize())


@pytest.mark.parametrize(("name", "layout"), MARKED)
def test_tensor_when_moved_or_cast_then_codes_stay(name, layout):
    tensor = quantized(name, layout)
    half = tensor.to(torch.bfloat16)
    assert half.dtype is torch.bfloat16
    assert torch.equal(half.dequantize(), tensor.dequantize().bfloat16())
    assert half.float().form == tensor.form
    meta = tensor.to("meta")
    assert isinstance(meta, QuantizedTensor)
    assert meta.device.type == "meta"


@pytest.mark.parametrize(("name", "layout"), MARKED)
def test_tensor_when_transposed_then_product_is_the_linear(name, layout):
    tensor, x = quantized(name, layout), torch.randn(3, 64)
    assert tensor.t().shape == (64, 16)
    assert torch.equal(tensor.t().dequantize(), tensor.dequantize().t())
    assert torch.equal(x @ tensor.t(), F.linear(x, tensor))
    assert torch.equal(tensor.transpose(0, 1).t().dequantize(), tensor.dequantize())
    assert tensor.t().t().form == tensor.form


@pytest.mark.parametrize("name", ["w8", "w4_g32", "mxfp4_weight_only", "nf4_double_g32"])
@pytest.mark.parametrize("dim", [0, 1])
def test_tensor_when_cut_along_blocks_then_parts_are_quantized(name, dim):
    tensor = quantized(name)
    parts = tensor.split(tensor.shape[dim] // 2, dim)
    assert all(isinstance(part, QuantizedTensor) for part in parts)
    expected = tensor.dequantize().split(tensor.shape[dim] // 2, dim)
    for part, real in zip(parts, expected, strict=True):
        assert torch.equal(part.dequantize(), real)
    narrowed = tensor.narrow(dim, 0, tensor.shape[dim] // 2)
    assert torch.equal(narrowed.dequantize(), parts[0].dequantize())


@pytest.mark.parametrize("name", ["w8", "w4_g32", "mxfp4_weight_only"])
def test_tensors_when_joined_along_rows_then_are_what_was_cut(name):
    tensor = quantized(name)
    joined = torch.cat(tensor.chunk(4), 0)
    assert isinstance(joined, QuantizedTensor)
    assert torch.equal(joined.codes.view(torch.uint8), tensor.codes.view(torch.uint8))


def test_tensor_when_a_cut_goes_through_a_block_then_is_real_and_recorded():
    forget_fallbacks()
    tensor = quantized("w4_g32")
    part = tensor[:, 8:40]
    assert type(part) is torch.Tensor
    assert torch.equal(part, tensor.dequantize()[:, 8:40])
    (((op, reason), count),) = fallbacks().items()
    assert (op, count) == ("aten.slice", 1)
    assert "cuts a block of scales" in reason


def test_tensor_when_strict_then_other_operations_are_refused():
    tensor = quantized()
    with strict(), pytest.raises(UnsupportedError, match=r"aten.sin.default of a quantized tensor"):
        tensor.sin()
    assert torch.equal(tensor.sin(), tensor.dequantize().sin())


def test_tensor_when_real_values_are_copied_in_then_codes_change_in_place():
    tensor = quantized("w4_g32", "packed")
    held, new = tensor.packed, torch.randn(16, 64)
    tensor.copy_(new)
    fresh = QuantizedTensor.from_float(new, tensor.scheme)
    assert torch.equal(tensor.dequantize(), fresh.dequantize())
    assert tensor.packed is held


@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_tensor_when_a_quantized_one_is_copied_in_then_codes_are_the_same(layout):
    tensor, other = quantized("w4_g32", layout), quantized("w4_g32", "plain")
    tensor.copy_(other)
    assert torch.equal(tensor.plain_parts()["codes"], other.codes)


@pytest.mark.usefixtures("no_kernels")
def test_tensor_when_it_takes_part_in_training_then_gradients_are_of_real_values():
    tensor = nn.Parameter(quantized("w8"))
    x = torch.randn(3, 64, requires_grad=True)
    F.linear(x, tensor).square().sum().backward()
    real = tensor.dequantize().detach().requires_grad_()
    other = x.detach().clone().requires_grad_()
    F.linear(other, real).square().sum().backward()
    torch.testing.assert_close(tensor.grad, real.grad)
    torch.testing.assert_close(x.grad, other.grad)
    assert type(tensor.grad) is torch.Tensor


def test_tensor_when_an_embedding_then_rows_are_gathered():
    places = torch.tensor([[0, 3], [15, 3]])
    for name, layout in PLACES:
        if layout == "onednn":
            continue
        tensor = quantized(name, layout)
        assert torch.equal(F.embedding(places, tensor), tensor.dequantize()[places])


def test_tensor_when_of_a_convolution_then_computes_with_real_values():
    layer = nn.Conv2d(4, 8, 3)
    real = QuantizedTensor.from_float(layer.weight, scheme_named("w8").weight)
    x = torch.randn(1, 4, 8, 8)
    expected = F.conv2d(x, real.dequantize(), layer.bias)
    layer.weight = nn.Parameter(real, requires_grad=False)
    assert torch.equal(layer(x), expected)


def test_tensor_when_printed_then_shows_format_and_range():
    text = repr(quantized("w4_g32", "packed"))
    assert text.startswith("QuantizedTensor(int4[-8, 7] symmetric PerGroup(group_size=32, axis=-1)")
    assert "layout=packed" in text
    assert "range=[" in text


def test_tensor_when_of_the_meta_device_then_a_state_dict_loads_into_it():
    source = nn.Linear(64, 16)
    source.weight = nn.Parameter(quantized("w4_g32", "packed"), requires_grad=False)
    with torch.device("meta"):
        empty = nn.Linear(64, 16)
    meta = QuantizedTensor.from_float(empty.weight, scheme_named("w4_g32").weight)
    empty.weight = nn.Parameter(meta, requires_grad=False)
    empty.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(2, 64)
    assert torch.equal(empty(x), source(x))


def test_tensor_when_scales_would_be_dynamic_then_refused():
    with pytest.raises(ConfigError, match="constant scales"):
        QuantizedTensor.from_float(torch.randn(4, 4), scheme_named("int8_dynamic").input)


@pytest.mark.parametrize("name", ["w8", "int8_dynamic"])
@NEEDS_VNNI
def test_module_when_its_weight_is_packed_for_onednn_then_moves_and_casts(name):
    scheme = scheme_named(name)
    layer = nn.Linear(64, 16)
    tensor = quantized("w8", "onednn", input=scheme.input)
    layer.weight = nn.Parameter(tensor, requires_grad=False)
    x = torch.randn(5, 64)
    expected = layer(x)
    real = copy.deepcopy(layer).to(torch.bfloat16)
    assert real.weight.dtype is torch.bfloat16
    found = real(x.bfloat16()).float()
    assert (found - expected).norm() < 0.03 * expected.norm()  # 8 bits of activations, twice


@pytest.mark.parametrize("dim", [0, 1])
def test_tensor_when_packed_and_cut_along_blocks_then_pieces_are_views(dim):
    tensor = quantized("w4_g32", "packed")
    half = tensor.shape[dim] // 2
    piece, other = tensor.narrow(dim, half, half), quantized("w4_g32", "packed", tensor.shape)
    assert piece.form.layout == "packed"
    real = tensor.dequantize().narrow(dim, half, half)
    assert torch.equal(piece.dequantize(), real)
    tensor.narrow(dim, half, half).copy_(other.narrow(dim, 0, half))
    assert torch.equal(
        tensor.dequantize().narrow(dim, half, half), other.dequantize().narrow(dim, 0, half)
    )


@pytest.mark.parametrize("scheme", ["w8", "w4_g32", "fp8_weight_only", "mxfp4_weight_only"])
def test_tensor_when_plainly_pickled_then_comes_back(scheme):
    # torch 2.13 itself cannot read floats of one byte back from a plain pickle.
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    pq.quantize_(model, scheme)
    weight = model[0].weight
    again = pickle.loads(pickle.dumps(weight))
    assert again.form.scheme == weight.form.scheme
    assert {n: p.dtype for n, p in again.to_layout("plain").parts.items()} == {
        n: p.dtype for n, p in weight.to_layout("plain").parts.items()
    }
    assert torch.equal(again.dequantize(), weight.dequantize())


def test_tensor_when_made_an_array_then_its_real_values_are_recorded():
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    pq.quantize_(model, "w8")
    weight = model[0].weight
    pq.tensors.forget_fallbacks()
    found = numpy.asarray(weight)
    assert found.dtype == numpy.float32
    assert torch.equal(torch.from_numpy(found), weight.dequantize())
    assert numpy.asarray(weight, dtype="float64").dtype == numpy.float64
    assert ("numpy", "arrays hold real values") in pq.tensors.fallbacks()


def test_tensor_when_made_a_list_then_its_real_values_are_recorded():
    weight = QuantizedTensor.from_float(torch.eye(4), scheme_named("w8").weight)
    pq.tensors.forget_fallbacks()
    assert weight.tolist() == weight.dequantize().tolist()
    assert ("tolist", "lists hold real values") in pq.tensors.fallbacks()


@pytest.mark.parametrize("scheme", ["w8", "w4_g32", "int8_dynamic", "fp8_weight_only", "nf4"])
def test_module_when_a_graph_of_it_is_alive_then_it_moves_to_another_dtype(scheme):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    pq.quantize_(model, scheme)
    x = torch.randn(4, 64, requires_grad=True)
    y = model(x)
    real = model[2].weight.dequantize() @ (
        torch.diag((model[0](x[0]) > 0).float()) @ model[0].weight.dequantize()
    )
    model.bfloat16()
    (grad,) = torch.autograd.grad(y[0].sum(), x)
    assert torch.allclose(grad[0], real.sum(0), atol=1e-5)
    assert model[0].weight.dtype == torch.bfloat16
    assert pq.sqnr_db([y], [model(x.bfloat16()).float()]) > 25


def _sum_of(model, results):
    with torch.no_grad():
        results.put(float(model(torch.ones(1, 64)).sum()))


@pytest.mark.parametrize("layout", ["plain", "auto"])
def test_tensor_when_handed_to_another_process_then_in_shared_memory(layout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32)).eval().requires_grad_(False)
    pq.quantize_(model, "w8", layout=layout)
    expected = float(model(torch.ones(1, 64)).sum())
    # The tensor itself has no storage: torch's own share_memory_ ended the process.
    assert model.share_memory()[0].weight.is_shared()
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    worker = context.Process(target=_sum_of, args=(model, results))
    worker.start()
    assert results.get(timeout=300) == pytest.approx(expected, rel=1e-4)
    worker.join()


def test_tensor_when_written_by_an_operator_on_lists_then_it_changes():
    tensor, other = quantized(), torch.ones(3)
    expected = tensor.dequantize() * 0.5
    torch._foreach_mul_([tensor, other], 0.5)
    assert torch.equal(other, torch.full((3,), 0.5))
    step = tensor.plain_parts()["scale"]
    assert bool(((tensor.dequantize() - expected).abs() <= step / 2).all())
