"""Training through the target's integers: exact forward, straight-through gradient."""

import copy
from dataclasses import replace

import pytest
import torch
from numerics_nets import Net, X, assert_exact, prepared_of, train
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.integer_ops.profiles import PROFILES, Quantization
from pt2e_quant.flow.qat.numerics import Numerics
from pt2e_quant.observers.training.fake_quantize import disable_fake_quant, disable_observer
from pt2e_quant.passes.batch_norm.trained_batch_norm import freeze_bn_stats
from pt2e_quant.passes.reference.integer_forward import IntegerForward


def test_integers_when_trained_then_convert_gives_the_training_forward():
    prepared = prepared_of("integer")
    losses = train(prepared, 6)
    assert losses[-1] < losses[0]
    prepared.apply(disable_observer).apply(freeze_bn_stats)
    train(prepared, 3)
    in_training = prepared(X)
    reference = pq.integer_reference(pq.convert_pt2e(copy.deepcopy(prepared)))
    assert torch.equal(reference(X), in_training)
    assert in_training.requires_grad
    assert_exact(prepared)


def test_gradient_when_integers_then_that_of_the_float_operator():
    one = prepared_of()
    train(one, 3)
    one.eval().apply(disable_observer)
    two = copy.deepcopy(one)
    # The last operator alone: all before it is the same, and so is the gradient of a sum.
    assert pq.set_numerics(two, "integer", nodes=["head"]) == ("linear",)
    for model in (one, two):
        model.zero_grad()
        model(X).sum().backward()
    for (name, p), (_, q) in zip(one.named_parameters(), two.named_parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
        assert bool(p.grad.abs().sum() > 0), name


COARSE = replace(PROFILES["tosa"], name="coarse", multiplier_bits=3)


@pytest.mark.parametrize("profile", [*PROFILES, COARSE], ids=str)
def test_profile_when_trained_with_then_the_reference_of_it_is_equal(profile):
    prepared = prepared_of("integer")
    train(prepared, 3)
    default = copy.deepcopy(prepared).eval().apply(disable_observer)(X)
    pq.set_numerics(prepared, "integer", profile=profile)
    found = copy.deepcopy(prepared).eval().apply(disable_observer)(X)
    # Others round alike nearly everywhere.
    assert profile is not COARSE or not torch.equal(found, default)
    assert_exact(prepared, profile)


def test_numerics_when_set_by_node_and_by_module_then_only_those_change():
    prepared = prepared_of()
    assert pq.numerics_of(prepared) == {}
    assert pq.set_numerics(prepared, "integer", nodes=["add"]) == ("add",)
    assert pq.set_numerics(prepared, "integer", nodes=["he*"]) == ("linear",)
    found = pq.numerics_of(prepared)
    assert found["add"] is found["linear"] is Numerics.INTEGER
    assert found["conv2d"] is found["conv2d_1"] is Numerics.FAKE_QUANT
    pq.set_numerics(prepared, "fake_quant")
    assert set(pq.numerics_of(prepared).values()) == {Numerics.FAKE_QUANT}


def test_numerics_when_unknown_then_near_names_are_offered():
    prepared = prepared_of()
    with pytest.raises(ConfigError, match='did you mean "integer"'):
        pq.set_numerics(prepared, "integers")
    with pytest.raises(ConfigError, match=r'"cnv2d" is no operator.*did you mean "conv2d"'):
        pq.set_numerics(prepared, "integer", nodes=["cnv2d"])
    with pytest.raises(ConfigError, match="no graph here that was prepared for training"):
        pq.set_numerics(nn.Linear(2, 2), "integer")


def test_graph_when_nothing_is_quantized_to_integers_then_refused():
    class Product(nn.Module):
        def forward(self, x):
            return torch.sin(x @ x)

    ep = torch.export.export(Product(), (torch.randn(4, 4),))
    with pytest.warns(pq.Pt2eQuantWarning):
        prepared = pq.prepare_qat_pt2e(
            ep, pq.backends.get("xnnpack").quantizer("int8"), strict=False
        )
    with pytest.raises(ConfigError, match="no operator of this graph has an integer form"):
        pq.set_numerics(prepared, "integer")


def test_integers_when_switched_off_then_as_if_never_on():
    plain, switched = prepared_of(), prepared_of("integer")
    pq.set_numerics(switched, "fake_quant")
    assert train(plain, 3) == train(switched, 3)


def test_batch_norm_when_its_statistics_move_then_its_conv_waits():
    prepared = prepared_of("integer")
    train(prepared, 1)
    switches = {m.name: m for m in prepared.modules() if isinstance(m, IntegerForward)}
    assert not switches["conv2d"].is_integer
    assert switches["conv2d_1"].is_integer
    prepared.apply(freeze_bn_stats)
    assert switches["conv2d"].is_integer


def test_fake_quantize_when_off_then_the_float_result_passes():
    prepared = prepared_of("integer")
    train(prepared, 2)
    prepared.eval().apply(disable_observer).apply(disable_fake_quant)
    expected = copy.deepcopy(prepared)
    pq.set_numerics(expected, "fake_quant")
    assert torch.equal(prepared(X), expected(X))


def test_schedule_when_due_then_integers_start():
    prepared = prepared_of()
    schedule = pq.QatSchedule(
        prepared, freeze_observers_after=2, freeze_bn_after=2, integer_after=3
    )
    seen = []
    for _ in range(4):
        train(prepared, 1)
        schedule.step()
        seen.append(set(pq.numerics_of(prepared).values()))
    assert seen == [{Numerics.FAKE_QUANT}] * 2 + [{Numerics.INTEGER}] * 2
    resumed = prepared_of()
    pq.QatSchedule(resumed, integer_after=3).load_state_dict(schedule.state_dict())
    assert set(pq.numerics_of(resumed).values()) == {Numerics.INTEGER}
    assert_exact(prepared)


class PerTensor(pq.Quantizer):
    """int8 convs and linears by one spec; biases in the steps of the accumulator."""

    def __init__(self, fake_quantize, has_biases=False):
        self.spec = pq.QuantizationSpec(
            torch.int8,
            fake_quantize,
            quant_min=-128,
            quant_max=127,
            qscheme=torch.per_tensor_affine,
        )
        self.has_biases = has_biases

    def annotate(self, model):
        for node in model.graph.nodes:
            if str(node.target) not in ("aten.linear.default", "aten.conv2d.default"):
                continue
            x, weight, *rest = node.args
            specs = {x: self.spec, weight: self.spec}
            if self.has_biases and rest and rest[0] is not None:
                specs[rest[0]] = pq.DerivedQuantizationSpec(
                    derived_from=[(x, node), (weight, node)],
                    derive_qparams_fn=bias_qparams,
                    dtype=torch.int32,
                    quant_min=-(2**31),
                    quant_max=2**31 - 1,
                    qscheme=torch.per_tensor_symmetric,
                )
            node.meta["quantization_annotation"] = pq.QuantizationAnnotation(
                specs, self.spec, _annotated=True
            )
        return model

    def validate(self, model):
        pass


def bias_qparams(observers):
    scales = [o.calculate_qparams()[0] for o in observers]
    return scales[0] * scales[1], torch.zeros(1, dtype=torch.int32)


def test_learned_ranges_when_integers_then_scales_train_and_the_result_is_exact():
    learns = pq.LearnableFakeQuantize.with_args(observer=pq.LSQObserver, use_grad_scaling=True)
    torch.manual_seed(0)
    ep = torch.export.export(Net().train(), (X,))
    prepared = pq.prepare_qat_pt2e(ep, PerTensor(learns), numerics="integer")
    prepared(X)
    prepared.apply(freeze_bn_stats)
    pq.QatSchedule(prepared, learn_ranges_after=1).step()
    before = {n: p.detach().clone() for n, p in prepared.named_parameters() if "scale" in n}
    train(prepared, 3)
    after = dict(prepared.named_parameters())
    assert before
    assert any(not torch.equal(v, after[n]) for n, v in before.items())
    assert_exact(prepared)


def test_biases_when_their_qparams_are_derived_then_the_result_is_exact():
    torch.manual_seed(0)
    model = Net().eval()
    with torch.no_grad():
        # Large in steps of the accumulator: rounded once as convert does, and once more for sums.
        model.conv.bias.mul_(100)
        model.head.bias.mul_(100)
    ep = torch.export.export(model.train(), (X,))
    quantizer = PerTensor(pq.FakeQuantize, has_biases=True)
    prepared = pq.prepare_qat_pt2e(ep, quantizer, numerics="integer")
    train(prepared, 3)
    assert sum(any(m.rounded) for m in prepared.modules() if isinstance(m, IntegerForward)) == 3
    assert_exact(prepared)


class Everything(pq.Quantizer):
    """All float tensors of all operators but those left float, int8 affine."""

    def __init__(self, left_float=()):
        super().__init__()
        self.left_float = left_float

    def annotate(self, model):
        spec = pq.QuantizationSpec(
            torch.int8,
            pq.FakeQuantize,
            quant_min=-128,
            quant_max=127,
            qscheme=torch.per_tensor_affine,
        )
        for node in model.graph.nodes:
            is_quantized = node.op == "call_function" and node.target not in self.left_float
            if is_quantized and is_real(node):
                inputs = {n: spec for n in node.all_input_nodes if is_real(n)}
                node.meta["quantization_annotation"] = pq.QuantizationAnnotation(
                    inputs, spec, _annotated=True
                )
        return model

    def validate(self, model):
        pass


def is_real(node):
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 1


class Sums(nn.Module):
    """Sums in float, whose triangle has no integer form, between two operators in integers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.second(torch.tril(torch.cumsum(self.first(x), 0)))


@pytest.mark.parametrize("at", ["input", "sums"])
def test_real_values_when_the_profile_divides_then_quantized_so_in_training(at):
    torch.manual_seed(0)
    x = torch.randn(256, 8)
    profile = PROFILES["onnxruntime_x86"]
    ep = torch.export.export(Sums().train(), (x,))
    of_rest = Everything([torch.ops.aten.cumsum.default, torch.ops.aten.tril.default])
    prepared = pq.prepare_qat_pt2e(ep, of_rest, numerics="integer", profile=profile)
    prepared(x).square().mean().backward()
    prepared.eval().apply(disable_observer)
    quantizes = [n for n in pq.numerics_of(prepared) if n.startswith("activation_post_process")]
    given, _, linear, sums, *_ = (
        prepared.get_submodule(f"activation_post_process_{i}") for i in range(6)
    )
    assert quantizes == ["activation_post_process_0", "activation_post_process_3"]
    # Values on ties: half a step from the integers.
    if at == "input":
        x = (torch.arange(2048).reshape(256, 8) % 300 - 149.5) * given.scale
    else:
        x = torch.randint(-20, 21, (256, 8)) * given.scale
        sums.scale.copy_(10 * linear.scale)
    found = prepared(x)
    assert torch.equal(found, converted(prepared, profile)(x))
    inverse = replace(profile, quantization=Quantization.INVERSE)
    assert not torch.equal(found, converted(prepared, inverse)(x))
    pq.set_numerics(prepared, "fake_quant", nodes=quantizes)
    assert torch.equal(prepared(x), converted(prepared, inverse)(x))


def converted(prepared, profile):
    return pq.integer_reference(pq.convert_pt2e(copy.deepcopy(prepared)), profile)


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(8), nn.Linear(8, 8)
        self.query, self.key, self.value = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.norm(x)
        scores = torch.matmul(self.query(y), self.key(y).transpose(1, 2)) * 0.35
        x = x + torch.matmul(scores.softmax(-1), self.value(y))
        return x * torch.sigmoid(x) + nn.functional.gelu(self.inner(x))


def test_transformer_when_trained_in_integers_then_the_reference_is_equal():
    torch.manual_seed(0)
    # Integers round otherwise than fake quantizers at some 30 of these 16,384 values only.
    x = torch.randn(128, 16, 8)
    prepared = pq.prepare_qat_pt2e(torch.export.export(Block().train(), (x,)), Everything())
    pq.set_numerics(prepared, "integer")
    optimizer = torch.optim.SGD(prepared.parameters(), 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        prepared(x).square().mean().backward()
        optimizer.step()
    names = set(pq.numerics_of(prepared))
    assert {"linear", "matmul", "matmul_1", "softmax", "layer_norm", "gelu", "silu"} <= names
    assert all(p.grad is not None for p in prepared.parameters())
    prepared.eval().apply(disable_observer)
    expected = prepared(x)
    plain = copy.deepcopy(prepared)
    pq.set_numerics(plain, "fake_quant")
    assert not torch.equal(plain(x), expected)
    reference = pq.integer_reference(pq.convert_pt2e(prepared))
    assert torch.equal(reference(x), expected)


def test_integer_quantizer_when_trained_then_the_reference_is_equal():
    torch.manual_seed(0)
    x = torch.randn(16, 16, 8)
    ep = torch.export.export(Block().train(), (x,))
    prepared = pq.prepare_qat_pt2e(ep, pq.IntegerQuantizer(), numerics="integer")
    optimizer = torch.optim.SGD(prepared.parameters(), 0.05)
    for _ in range(2):
        optimizer.zero_grad()
        prepared(x).square().mean().backward()
        optimizer.step()
    prepared.eval().apply(disable_observer)
    expected = prepared(x)
    quantized = pq.convert_pt2e(prepared)
    assert pq.audit(quantized).is_integer_only
    assert torch.equal(pq.integer_reference(quantized)(x), expected)


def test_sum_when_it_may_overflow_then_the_operator_and_the_fix_are_named():
    class Long(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(140_000, 1)

        def forward(self, x):
            return self.inner(x)

    x = torch.randn(2, 140_000)
    ep = torch.export.export(Long(), (x,))
    prepared = pq.prepare_qat_pt2e(ep, PerTensor(pq.FakeQuantize), numerics="integer")
    with pytest.raises(UnsupportedError, match=r'linear: [\s\S]*"fake_quant", nodes=\["linear"\]'):
        prepared(x)
    with pytest.raises(ConfigError, match="32 or 64, found 48"):
        pq.set_numerics(prepared, "integer", accumulator_bits=48)
    pq.set_numerics(prepared, "integer", accumulator_bits=64)
    trained = prepared(x)
    reference = pq.integer_reference(pq.convert_pt2e(copy.deepcopy(prepared)), accumulator_bits=64)
    assert torch.equal(reference(x), trained)
    pq.set_numerics(prepared, "fake_quant", nodes=["linear"])
    prepared(x)
