"""What quantized modules go with: each cell of the table in docs/tensors.md."""

import copy

import peft
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.tensors import QuantizedTensor, load_module, register_hugging_face, save_module
from pt2e_quant.tensors.graphs.graph import quantized_weights
from pt2e_quant.tensors.quantize import quantize_
from tests.needs_vnni import NEEDS_VNNI

SCHEMES = ("w8", "int8_dynamic", "w4_g32", "mxfp4_weight_only", "fp8_dynamic")
X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 96)
        self.second = nn.Linear(96, 64)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


def net(name, **named):
    model = Net().eval()
    quantize_(model, name, **named)
    return model


@pytest.mark.parametrize("name", SCHEMES)
def test_module_when_compiled_whole_then_computes_the_same(name):
    model = net(name)
    torch._dynamo.reset()  # each case is a new module, not one more recompile
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), model(X), rtol=1e-4, atol=1e-5)
    x = X.clone().requires_grad_()
    compiled(x).sum().backward()
    other = X.clone().requires_grad_()
    model(other).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMES)
def test_module_when_compiled_by_inductor_then_computes_the_same(name):
    model = net(name)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), model(X), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.usefixtures("no_kernels")
def test_module_when_exported_by_torch_then_computes_the_same(name):
    model = net(name, layout="plain")
    program = torch.export.export(model, (X,))
    assert torch.equal(program.module()(X), model(X))


@pytest.mark.parametrize("name", SCHEMES)
def test_module_when_saved_as_safetensors_then_loads_into_a_float_one(name, tmp_path):
    model, path = net(name), tmp_path / "model.safetensors"
    save_module(model, path)
    fresh = Net().eval()
    load_module(fresh, path)
    assert torch.equal(fresh(X), model(X))
    assert fresh.first.weight.form == model.first.weight.form
    with torch.device("meta"):
        empty = Net().eval()
    load_module(empty, path)
    assert torch.equal(empty(X), model(X))


def test_safetensors_when_of_another_model_then_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save_module(net("w8"), path)
    with pytest.raises(ConfigError, match="the file has no"):
        load_module(nn.Sequential(nn.Linear(64, 96)), path)


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=128,
        )
    ).eval()


TOKENS = torch.tensor([[1, 5, 7, 100]])


@pytest.mark.parametrize("name", ["w8", "w4_g32"])
def test_hugging_face_when_saved_and_loaded_then_logits_are_equal(name, tmp_path):
    config = register_hugging_face()(scheme=name)
    llama().save_pretrained(tmp_path / "float")
    model = LlamaForCausalLM.from_pretrained(tmp_path / "float", quantization_config=config)
    found = quantized_weights(model)
    assert len(found) == 7  # the head stays float
    model.save_pretrained(tmp_path / "codes")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "codes")
    assert set(quantized_weights(again)) == set(found)
    with torch.no_grad():
        assert torch.equal(again(TOKENS).logits, model(TOKENS).logits)
    sizes = [(tmp_path / p / "model.safetensors").stat().st_size for p in ("float", "codes")]
    assert sizes[1] < 0.7 * sizes[0]


@pytest.mark.parametrize("name", ["w8", "w4_g32"])
def test_lora_when_over_a_quantized_base_then_adapters_alone_are_trained(name):
    model = llama()
    quantize_(model, name, lambda module, path: path.endswith("_proj"))
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    )
    before = {n: t.dequantize() for n, t in quantized_weights(wrapped).items()}
    assert before
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=1.0)
    losses = []
    for _ in range(4):
        loss = wrapped(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    after = quantized_weights(wrapped)
    assert all(torch.equal(after[n].dequantize(), real) for n, real in before.items())


@pytest.mark.parametrize("name", SCHEMES)
def test_module_when_activations_are_recomputed_then_gradients_are_equal(name):
    model = net(name)
    x, other = (X.clone().requires_grad_() for _ in range(2))
    checkpoint(model, x, use_reentrant=False).sum().backward()
    model(other).sum().backward()
    assert torch.equal(x.grad, other.grad)


@pytest.mark.parametrize("name", SCHEMES)
def test_module_when_under_autocast_then_results_have_its_dtype(name):
    model = net(name)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = model(X)
    assert found.dtype is torch.bfloat16
    expected = model(X)
    assert (found.float() - expected).norm() < 0.05 * expected.norm()


def test_module_when_written_in_place_then_codes_follow():
    model = net("w8", layout="plain")
    weight = model.first.weight
    expected = weight.dequantize() * 2
    weight.data.mul_(2)
    assert isinstance(model.first.weight, QuantizedTensor)
    torch.testing.assert_close(model.first.weight.dequantize(), expected)
    again = copy.deepcopy(model)
    assert torch.equal(again(X), model(X))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("layout", ["plain", "auto"])
def test_distributed_checkpoint_when_loaded_in_place_then_codes_are_those_saved(layout, tmp_path):
    # It writes into detached tensors: opaque parts, which are replaced, were lost.
    models = [nn.Sequential(nn.Linear(64, 32)).eval() for _ in range(2)]
    for model in models:
        quantize_(model, "w8", layout=layout)
    saved, loaded = models
    dcp.save({"model": saved.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    state = {"model": loaded.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    loaded.load_state_dict(state["model"])
    x = torch.randn(2, 64)
    assert torch.equal(loaded[0].weight.dequantize(), saved[0].weight.dequantize())
    assert torch.equal(loaded(x), saved(x))


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's own, vmap
@pytest.mark.parametrize("scheme", ["w8", "w4_g32", "int8_dynamic", "fp8_weight_only"])
def test_torch_func_when_it_differentiates_then_gradients_are_those_of_autograd(scheme):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8)).eval()
    pq.quantize_(model, scheme)
    x = torch.randn(3, 64)
    given = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(given).sum(), given)
    found = torch.func.vmap(torch.func.grad(lambda row: model(row).sum()))(x)
    assert pq.sqnr_db([expected], [found]) > 35
    rows = torch.func.jacrev(model)(x[0])
    assert pq.sqnr_db([expected[0]], [rows.sum(0)]) > 35


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.last = nn.Linear(64, 64)

    def forward(self, x):
        return self.last(self.attention(x, x, x)[0])


@pytest.mark.parametrize("scheme", ["w8", "int8_dynamic", "w4_g32", "fp8_weight_only"])
def test_to_when_a_result_of_attention_waits_for_its_backward_pass_then_works(scheme):
    torch.manual_seed(0)
    model = Attends()
    pq.quantize_(model, scheme)
    x = torch.randn(2, 5, 64, requires_grad=True)
    model(x).square().sum().backward()
    expected, x.grad = x.grad, None
    result = model(x)
    model.to(torch.bfloat16)
    result.square().sum().backward()
    assert torch.equal(x.grad, expected)
    assert next(w for w in model.parameters() if isinstance(w, QuantizedTensor)).dtype is (
        torch.bfloat16
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.addmm(torch.zeros(64), x, w.t()),
        lambda x, w: torch.mul(x, w[0]),
        lambda x, w: x[:1] * w,
        lambda x, w: torch.einsum("ij,kj->ik", x, w),
    ],
)
def test_to_when_any_function_keeps_the_weight_then_works(function):
    model = nn.Sequential(nn.Linear(64, 64))
    pq.quantize_(model, "w8")
    x = torch.randn(5, 64, requires_grad=True)
    result = function(x, model[0].weight)
    model.to(torch.bfloat16)
    result.sum().backward()
    assert bool(x.grad.any())


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("layout", ["plain", pytest.param("onednn", marks=NEEDS_VNNI)])
def test_module_when_traced_by_torchscript_then_refused(layout):
    with pytest.raises(UnsupportedError, match=r"(?s)torch\.jit\.trace cannot hold.*torch\.export"):
        torch.jit.trace(net("w8", layout=layout), (X,))


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def weight_of(scheme, **options):
    model = Net().eval()
    quantize_(model, scheme, **options)
    return model.first.weight.detach()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_collective_when_it_copies_a_quantized_tensor_then_its_parts_are_copied(scheme):
    weight = weight_of(scheme, layout="plain")
    received = torch.empty_like(weight)
    assert not bool(received.dequantize().any())
    dist.scatter(received, [weight])
    assert type(received) is QuantizedTensor
    assert received.form == weight.form
    assert torch.equal(received.dequantize(), weight.dequantize())
    dist.broadcast(received, 0)
    assert torch.equal(received.dequantize(), weight.dequantize())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_collective_when_it_computes_with_a_quantized_tensor_then_refused_in_time(scheme):
    weight = weight_of(scheme, layout="plain")
    with pytest.raises(UnsupportedError, match=r"training\.quantize_parameters"):
        dist.all_reduce(weight)


@pytest.mark.usefixtures("one_rank")
def test_collective_when_its_tensors_have_several_forms_then_refused():
    weight, other = weight_of("w8", layout="plain"), weight_of("w4_g32", layout="plain")
    with pytest.raises(UnsupportedError, match="of several forms"):
        dist.scatter(weight, [other])
    with pytest.raises(UnsupportedError, match="of several forms"):
        dist.scatter(weight, [weight.dequantize()])
