import copy
import gc
import io
import pickle
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.formats.format_schemes import code_book_scheme
from pt2e_quant.core.formats.number_formats import CodeBook
from pt2e_quant.core.granularity import PerChannel
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from pt2e_quant.tensors.values import encode
from pt2e_quant.training import (
    StoredParameter,
    quantize_parameters,
    state_bytes,
    with_master_weights,
)
from pt2e_quant.training.stored_parameters import encode_stochastically

LEVELS = tuple((i / 127) ** 2 for i in range(1, 128))
OWN = code_book_scheme(
    CodeBook(name="squares", bits=8, values=(*(-v for v in reversed(LEVELS)), 0.0, *LEVELS)),
    PerChannel(axis=0),
)
ADAM = torch.optim.AdamW
OWN_TABLE = pytest.param(OWN, id="own table")
SCHEMES = ("w8", OWN_TABLE, "fp8_weight_only", "w4_g32", "nf4", "mxfp4_weight_only", "nvfp4")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 64, generator=generator)
    return x, (x @ torch.randn(64, 64, generator=generator)).tanh()


def step(model, optimizer, count=1, micro_batches=1):
    x, y = data()
    for _ in range(count):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            loss = (model(x) - y).square().mean() / micro_batches
            loss.backward()
        optimizer.step()
    return loss.item() * micro_batches


def large_floats():
    """All float tensors there are of the shapes of the weights."""
    return [
        x
        for x in gc.get_objects()
        if type(x) in (torch.Tensor, nn.Parameter)
        and x.is_floating_point()
        and x.shape in ((128, 64), (64, 128))
    ]


def test_quantize_parameters_when_trained_then_no_float_copy_is_left_between_steps():
    gc.collect()
    before = large_floats()  # of other tests
    model = quantize_parameters(net(), "w8", grad_dtype=torch.bfloat16)
    optimizer = with_master_weights(ADAM, model, lr=1e-3)
    step(model, optimizer, 2)
    weights = [model[0].weight, model[2].weight]
    for weight in weights:
        assert (weight.grad.dtype, type(weight.grad)) == (torch.bfloat16, torch.Tensor)
    count = 2 * 64 * 128
    biases = 128 + 64
    assert [w.nbytes for w in weights] == [128 * 64 + 4 * 128, 64 * 128 + 4 * 64]
    assert sum(w.grad.nbytes for w in weights) == 2 * count
    # the master and two moments in float32, of biases the moments alone, and four counts of steps
    assert state_bytes(optimizer) == 4 * (3 * count + 2 * biases) + 4 * 4
    optimizer.zero_grad()
    gc.collect()
    own = [value for kept in optimizer.state.values() for value in kept.values()]
    assert {id(x) for x in large_floats()} <= {id(x) for x in [*own, *before]}


@pytest.mark.parametrize("every", [1, 3])
def test_quantize_parameters_when_steps_are_taken_then_each_nth_quantizes_once(every):
    model = quantize_parameters(net(), "w8", every=every)
    optimizer = with_master_weights(ADAM, model, lr=1e-2)
    weight = model[0].weight
    seen = [weight.codes.clone()]
    for _ in range(6):
        step(model, optimizer, micro_batches=2)
        seen.append(weight.codes.clone())
    assert weight.requantizations == 6 // every
    changed = [not torch.equal(a, b) for a, b in pairwise(seen)]
    assert changed == [(i + 1) % every == 0 for i in range(6)]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_quantize_parameters_when_stored_in_a_format_then_it_learns(scheme, rounding):
    model = quantize_parameters(net(), scheme, rounding=rounding)
    optimizer = with_master_weights(ADAM, model, lr=3e-3)
    first = step(model, optimizer)
    assert step(model, optimizer, 30) < 0.75 * first
    bits = scheme_named(scheme).weight.bits if isinstance(scheme, str) else 8
    # codes, scales of no more than a bit for each, and a table of float32
    assert model[0].weight.nbytes <= 128 * 64 * (bits + 1) / 8 + 4 * 255


@pytest.mark.parametrize("scheme", ["w8", OWN_TABLE])
def test_quantize_parameters_when_trained_then_loss_is_near_that_of_float32(scheme):
    plain = net()
    expected = step(plain, ADAM(plain.parameters(), lr=3e-3), 60)
    model = quantize_parameters(net(), scheme, grad_dtype=torch.bfloat16)
    found = step(model, with_master_weights(ADAM, model, lr=3e-3), 60)
    assert found < 1.02 * expected


@pytest.mark.parametrize(
    "scheme", ["w8", "w4_g32", OWN_TABLE, "fp8_weight_only", "fp4_weight_only"]
)
def test_encode_stochastically_when_averaged_then_the_values_come_back(scheme):
    torch.manual_seed(0)
    named = scheme_named(scheme).weight if isinstance(scheme, str) else scheme.weight
    values = torch.randn(4, 64)
    tensor = QuantizedTensor.from_float(values, named)
    total = torch.zeros_like(values)
    runs = 2000
    for _ in range(runs):
        parts = tensor.parts | {"codes": encode_stochastically(values, tensor.parts, tensor.form)}
        total += QuantizedTensor(parts, tensor.form).dequantize()
    real = tensor.dequantize()

    def end(value):
        codes = encode(torch.full_like(values, value), tensor.parts, tensor.form)
        return QuantizedTensor(tensor.parts | {"codes": codes}, tensor.form).dequantize()

    inside = (values >= end(-1e6)) & (values <= end(1e6))  # others saturate
    largest_step = 2 * (real - values)[inside].abs().max()
    # five standard deviations of a mean of coins
    assert (total / runs - values)[inside].abs().max() < 5 * 0.5 * largest_step / runs**0.5
    again = encode_stochastically(real, tensor.parts, tensor.form)
    assert torch.equal(
        QuantizedTensor(tensor.parts | {"codes": again}, tensor.form).dequantize(), real
    )


def test_stored_parameter_when_copied_then_it_goes_on_alike():
    model = quantize_parameters(net(), "w8", grad_dtype=torch.bfloat16, every=2)
    optimizer = with_master_weights(ADAM, model, lr=1e-2)
    step(model, optimizer, 3)
    other = copy.deepcopy(model)
    weight, copied = model[0].weight, other[0].weight
    assert isinstance(copied, StoredParameter)
    assert isinstance(copied, nn.Parameter)
    assert (copied.requantizations, copied.steps, copied.every) == (1, 1, 2)
    assert copied.grad_dtype == torch.bfloat16
    assert torch.equal(copied.codes, weight.codes)
    assert torch.equal(copied.grad, weight.grad)


def test_stored_parameter_when_its_state_dict_is_loaded_then_codes_are_equal():
    for scheme in ("w8", "w4_g32"):
        model = quantize_parameters(net(), scheme)
        step(model, with_master_weights(ADAM, model, lr=1e-2), 2)
        stream = io.BytesIO()
        torch.save(model.state_dict(), stream)
        stream.seek(0)
        fresh = quantize_parameters(net(), scheme)
        fresh.load_state_dict(torch.load(stream, weights_only=True))
        assert torch.equal(fresh[0].weight.dequantize(), model[0].weight.dequantize())
        assert torch.equal(fresh(data()[0]), model(data()[0]))


def test_stored_parameter_when_checkpointed_or_compiled_then_gradients_are_equal():
    model = quantize_parameters(net(), "w8")
    x, _ = data()

    def gradients(run):
        model.zero_grad()
        run(x).square().mean().backward()
        return [param.grad.clone() for param in model.parameters()]

    expected = gradients(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for run in (lambda x: checkpoint(model, x, use_reentrant=False), compiled):
        found = gradients(run)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_stored_parameter_when_under_autocast_then_its_gradient_has_its_own_dtype():
    model = quantize_parameters(net(), "w8", grad_dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(data()[0])
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert model[0].weight.grad.dtype == torch.bfloat16
    assert model[0].bias.grad.dtype == torch.float32


def test_quantize_parameters_when_weights_are_of_convolutions_and_embeddings_then_they_train():
    torch.manual_seed(0)
    model = nn.ModuleDict({"table": nn.Embedding(10, 16), "conv": nn.Conv1d(16, 8, 3)})
    model["up"] = nn.ConvTranspose1d(8, 4, 3)
    quantize_parameters(model, "w8", grad_dtype=torch.bfloat16)
    optimizer = with_master_weights(ADAM, model, lr=1e-2)
    ids = torch.arange(10).reshape(2, 5)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model["up"](model["conv"](model["table"](ids).transpose(1, 2))) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert model["up"].weight.scheme.granularity == PerChannel(1)
    assert model["table"].weight.grad.dtype == torch.bfloat16


def test_quantize_parameters_when_weights_are_tied_then_they_stay_one():
    model = nn.ModuleDict({"table": nn.Embedding(10, 16), "head": nn.Linear(16, 10)})
    model["head"].weight = model["table"].weight
    quantize_parameters(model, "w8")
    assert model["head"].weight is model["table"].weight


@pytest.mark.parametrize("write", [torch.save, pickle.dump])
def test_stored_parameter_when_its_model_is_pickled_then_it_goes_on_alike(write):
    model = quantize_parameters(net(), "fp8_weight_only", grad_dtype=torch.bfloat16, every=2)
    step(model, with_master_weights(ADAM, model, lr=1e-2), 3)
    file = io.BytesIO()
    write(model, file)
    file.seek(0)
    other = torch.load(file, weights_only=False) if write is torch.save else pickle.load(file)
    weight, copied = model[0].weight, other[0].weight
    assert isinstance(copied, StoredParameter)
    assert isinstance(copied, nn.Parameter)
    assert (copied.requantizations, copied.steps, copied.every) == (1, 1, 2)
    assert copied.grad_dtype == torch.bfloat16
    assert torch.equal(copied.dequantize(), weight.dequantize())
    step(other, with_master_weights(ADAM, other, lr=1e-2))
    assert copied.requantizations == 2


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str
)
def test_stored_parameter_when_an_optimizer_steps_on_its_codes_then_it_refuses(options):
    # Operators on lists of tensors wrote nothing: the model did not train, without a word.
    model = quantize_parameters(net(), "w8")
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    with pytest.raises(
        UnsupportedError, match=r"(?s)cannot step on the codes.*with_master_weights"
    ):
        step(model, optimizer)


def test_quantize_parameters_when_arguments_are_wrong_then_it_refuses():
    with pytest.raises(ConfigError, match='no rounding "down": known: nearest, stochastic'):
        quantize_parameters(net(), "w8", rounding="down")
    with pytest.raises(ConfigError, match=r"grad_dtype is a float dtype.*found torch\.int8"):
        quantize_parameters(net(), "w8", grad_dtype=torch.int8)
    with pytest.raises(ConfigError, match="less than 16 bits"):
        quantize_parameters(net(), scheme_named("a16w8").input)
    with pytest.raises(ConfigError, match="table fitted to each weight"):
        quantize_parameters(net(), "lut4", rounding="stochastic")
    with pytest.raises(ConfigError, match="every is a whole number of at least 1"):
        quantize_parameters(net(), "w8", every=0)
    with pytest.raises(ConfigError, match="no weight is meant"):
        quantize_parameters(net(), "w8", filter=lambda module, name: False)
    with pytest.raises(ConfigError, match='"0" is quantized already'):
        quantize_parameters(quantize_parameters(net(), "w8"), "w8")


def test_quantize_parameters_when_one_weight_does_not_fit_then_it_is_named_and_none_is_stored():
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4))
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError, match='the weight of "1" cannot be stored as int4'):
        quantize_parameters(model, "w4_g32")
    assert all(value is before[name] for name, value in model.named_parameters())


def test_quantize_parameters_when_a_module_is_in_two_places_then_it_stays_one():
    layer = nn.Linear(8, 8)
    model = quantize_parameters(nn.Sequential(layer, nn.ReLU(), layer), "w8")
    assert model[0].weight is model[2].weight
    stored = [n for n, p in model.named_parameters() if isinstance(p, StoredParameter)]
    assert stored == ["0.weight"]


def test_stored_parameter_when_a_shard_is_to_be_made_of_it_then_it_refuses():
    weight = quantize_parameters(net(), "w8")[0].weight
    with pytest.raises(UnsupportedError, match="is not sharded"):
        weight.new_zeros(2, 2)
