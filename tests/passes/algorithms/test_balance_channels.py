"""Factors per channel from weights alone: where they go, what stays equal, what they gain."""

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import INT8_ACTIVATION, INT8_WEIGHT, Role, Scheme
from pt2e_quant.core.specs import Q_ANNOTATION_KEY, QuantizationAnnotation
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.graph.op_table import Slot
from pt2e_quant.graph.ops import LINEAR, argument, is_call
from pt2e_quant.graph.pipeline import GraphPass, PassResult, run_passes
from pt2e_quant.passes.algorithms.algorithm import APPLIED_KEY, as_pass
from pt2e_quant.passes.algorithms.balance_channels import BalanceChannels

BALANCE = as_pass(BalanceChannels())
SLOTS = {
    "input": Slot(at="x", role=Role.INPUT, accepts=()),
    "weight": Slot(at="w", role=Role.WEIGHT, accepts=()),
}


def balance_channels(scheme_for) -> GraphPass:
    """Annotates linears by a scheme each, as a quantizer does, and balances them."""

    def edit(gm) -> PassResult:
        for node in linears(gm):
            scheme = scheme_for(node)
            if scheme is None or Q_ANNOTATION_KEY in node.meta:
                continue
            slots = [(name, slot, scheme.for_role(slot.role)) for name, slot in SLOTS.items()]
            made = {argument(node, n): ObserverChoice().spec(s, f) for n, s, f in slots if f}
            node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(made, _annotated=True)
        return BALANCE(gm)

    return GraphPass("balance_channels", edit, needs=(), gives=())


DYNAMIC = scheme_named("int8_dynamic")
ALL_DYNAMIC = balance_channels(lambda node: DYNAMIC)
WIDTH = 32
OUTLIERS = torch.ones(WIDTH).index_fill_(0, torch.tensor([3, 11]), 40.0)


class SpelledNorm(nn.Module):
    """An RMS norm as transformers writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Normed(nn.Module):
    """Linears behind a norm with outlier channels, which a residual may read too."""

    def __init__(self, norm: str = "layer", *, residual: bool = False, readers: int = 1) -> None:
        super().__init__()
        made = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "spelled": lambda width: SpelledNorm()}
        self.norm = made[norm](WIDTH)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(readers))
        self.residual = residual
        with torch.no_grad():
            self.norm.weight.mul_(OUTLIERS)
            if norm == "layer":
                self.norm.bias.normal_()
            for linear in self.linears:
                linear.weight.div_(OUTLIERS)

    def forward(self, x):
        y = self.norm(x)
        found = self.linears[0](y)
        for linear in self.linears[1:]:
            found = found + linear(y)
        return found + y if self.residual else found


class Gated(nn.Module):
    """A gated MLP whose gate and value have rows partly alike or opposed."""

    def __init__(self, *, bias: bool = False, hidden: int = 64) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, hidden, bias=bias)
        self.up = nn.Linear(WIDTH, hidden, bias=bias)
        self.down = nn.Linear(hidden, WIDTH, bias=bias)
        with torch.no_grad():
            shares = torch.linspace(-0.9, 0.9, hidden)[:, None]
            self.up.weight.copy_(shares * self.gate.weight + 0.3 * self.up.weight)
            self.up.weight[:4] *= 6

    def forward(self, x):
        y = self.norm(x)
        return self.down(F.silu(self.gate(y)) * self.up(y))


class Relu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 48), nn.Linear(48, 8)
        with torch.no_grad():
            self.first.weight[:3] *= 30
            self.second.weight[:, :3] /= 30

    def forward(self, x):
        return self.second(F.relu(self.first(self.norm(x))))


def linears(gm):
    return [node for node in gm.graph.nodes if is_call(node, LINEAR)]


def factors(gm, model, name: str, module: str) -> torch.Tensor:
    """What each column of a linear's weight was multiplied by."""
    changed = dict(gm.named_parameters())[name] / model.get_submodule(module).weight
    return changed.median(0).values.detach()


X = torch.randn(1, 6, WIDTH, generator=torch.Generator().manual_seed(7))


def test_factors_when_only_linears_read_the_norm_then_folded_into_it(program):
    found = program(Normed(), (X,))
    text = found.text
    found.apply(ALL_DYNAMIC).shows(text).matches((2 * X,)).leaves_model_alone()
    assert found.changed
    # an outlier is divided in the norm and multiplied back in the weight
    norms = found.gm.norm.weight / found.model.norm.weight
    assert norms[3].abs() < 0.3 * norms[4].abs()
    found.is_idempotent(ALL_DYNAMIC)


def test_factors_when_a_residual_reads_the_norm_then_a_multiplication(program):
    found = program(Normed(residual=True), (X,))
    found.shows(
        """
        x: f32[1, 6, 32] = input
        layer_norm: f32[1, 6, 32] = layer_norm(x, [32], weight=norm.weight, bias=norm.bias, cudnn_enable=False)
        linear: f32[1, 6, 32] = linear(layer_norm, linears.0.weight, bias=linears.0.bias)
        add: f32[1, 6, 32] = add(linear, layer_norm)
        return (add)
        """  # noqa: E501
    )
    found.apply(ALL_DYNAMIC).shows(
        """
        x: f32[1, 6, 32] = input
        layer_norm: f32[1, 6, 32] = layer_norm(x, [32], weight=norm.weight, bias=norm.bias, cudnn_enable=False)
        mul: f32[1, 6, 32] = mul(layer_norm, linears.0.input_scale)
        linear: f32[1, 6, 32] = linear(mul, linears.0.weight, bias=linears.0.bias)
        add: f32[1, 6, 32] = add(linear, layer_norm)
        return (add)
        """  # noqa: E501
    )
    found.matches().leaves_model_alone().is_idempotent(ALL_DYNAMIC)
    assert torch.equal(found.gm.norm.weight, found.model.norm.weight)


class WrittenNorm(nn.Module):
    """A norm whose weight each call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", OUTLIERS.clone())
        self.linear = nn.Linear(WIDTH, 8)
        with torch.no_grad():
            self.linear.weight.div_(OUTLIERS)

    def forward(self, x):
        y = F.layer_norm(x, (WIDTH,), self.weight)
        self.weight.add_(1.0)
        return self.linear(y)


class SharedNorm(nn.Module):
    """One norm's weight before two linears: neither may change it for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Normed().norm
        self.first, self.second = Normed().linears[0], Normed().linears[0]

    def forward(self, x):
        return self.second(self.norm(self.first(self.norm(x))))


@pytest.mark.parametrize(("model", "expected"), [(WrittenNorm(), 0), (SharedNorm(), 2)])
def test_factors_when_a_norms_weight_is_written_or_shared_then_none_or_a_multiplication(
    program, model, expected
):
    found = program(model, (X,)).apply(ALL_DYNAMIC)
    assert found.targets().get("aten.mul.Tensor", 0) == expected
    twin = copy.deepcopy(found.gm)  # of the same buffers before either call writes them
    expected_calls = [copy.deepcopy(model)(X)]
    torch.testing.assert_close([twin(X)], expected_calls, rtol=1e-4, atol=1e-4)


def test_factors_when_two_linears_read_one_norm_then_they_share_them(program):
    found = program(Normed("spelled", readers=2), (X,)).apply(ALL_DYNAMIC).matches()
    shared = [factors(found.gm, found.model, f"linears.{i}.weight", f"linears.{i}") for i in (0, 1)]
    torch.testing.assert_close(shared[0], shared[1], rtol=1e-5, atol=0)


def test_factors_when_an_mlp_is_gated_then_in_rows_with_tails_on_one_side(program):
    found = program(Gated(bias=True), (X,))
    text = found.text
    found.apply(ALL_DYNAMIC).shows(text).matches().leaves_model_alone().is_idempotent(ALL_DYNAMIC)
    found_factors = factors(found.gm, found.model, "down.weight", "down")
    opposed = slice(4, 24)  # gate and value have opposite rows: mostly negative products
    assert (found_factors[opposed] < 0).all()
    assert (found_factors[40:] > 0).all()
    assert found_factors[:4].abs().median() > 1.5 * found_factors[4:].abs().median()


def test_factors_when_a_relu_stands_between_then_none_is_negative(program):
    found = program(Relu(), (X,)).apply(ALL_DYNAMIC).matches().leaves_model_alone()
    found_factors = factors(found.gm, found.model, "second.weight", "second")
    assert found.changed
    assert (found_factors > 0).all()


def test_weight_only_when_balanced_then_no_factor_is_negative(program):
    w4 = balance_channels(lambda node: scheme_named("w4"))
    found = program(Normed(), (X,)).apply(w4).matches()
    assert found.changed
    assert (factors(found.gm, found.model, "linears.0.weight", "linears.0") > 0).all()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return F.linear(self.norm(self.table(x)), self.table.weight)


class Unknown(nn.Module):
    """A linear of an input, one behind a gelu, and one whose input others read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        y = self.a(x)
        z = self.b(F.gelu(y))
        return self.c(z) + z


IDS = torch.arange(6)[None]
STATIC = Scheme(name="int8", input=INT8_ACTIVATION, output=None, weight=INT8_WEIGHT)


@pytest.mark.parametrize(
    ("model", "inputs", "scheme", "reasons"),
    [
        (Tied(), IDS, DYNAMIC, ["the weight of linear has other readers"]),
        (
            Unknown(),
            X,
            DYNAMIC,
            [
                "x is made by no norm, linear or product with a linear",
                "gelu is made by no norm, linear or product with a linear",
                "linear_1 is read by others too",
            ],
        ),
        (nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 3)), X, DYNAMIC,
         ["input_1 is made by no norm, linear or product with a linear",
          "the weights before it do not tell its channels' sizes"]),
        (nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)), X, DYNAMIC,
         ["no factor per channel lowers the expected error enough"]),
        (Normed(), X, STATIC, []),
        (Normed(), X, None, []),
        (Normed(), X, scheme_named("fp8"), []),
    ],
)  # fmt: skip
def test_declined_when_nothing_can_or_need_be_done_then_a_reason(
    program, model, inputs, scheme, reasons
):
    found = program(model, (inputs,)).apply(balance_channels(lambda node: scheme))
    assert not found.changed
    assert found.skips == reasons


def test_balance_when_readers_have_different_schemes_then_declined(program):
    schemes = {"linear": DYNAMIC, "linear_1": scheme_named("a8w4_g32")}
    found = program(Normed(readers=2), (X,))
    found.apply(balance_channels(lambda node: schemes[node.name]))
    assert found.skips == ["its readers have different schemes"]


def test_rule_when_a_reader_stays_float_then_a_multiplication_for_the_others(program):
    schemes = {"linear": DYNAMIC, "linear_1": None}
    found = program(Normed(readers=2), (X,))
    found.apply(balance_channels(lambda node: schemes[node.name])).matches()
    assert sum(APPLIED_KEY in node.meta for node in linears(found.gm)) == 1
    assert found.targets()["aten.mul.Tensor"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_when_balanced_then_the_same_to_the_last_bit(program, dtype):
    """Powers of two and signs multiply without rounding, short of the smallest numbers."""
    model, x = Normed(residual=True).to(dtype), X.to(dtype)
    found = program(model, (x,)).apply(ALL_DYNAMIC)
    assert found.changed
    changed = factors(found.gm, model, "linears.0.weight", "linears.0").abs().log2()
    assert torch.equal(changed, changed.round())
    assert torch.equal(found.gm(x), model(x))


@settings(max_examples=12)
@given(
    seed=st.integers(0, 99),
    norm=st.sampled_from(["layer", "rms", "spelled"]),
    scheme=st.sampled_from(["int8_dynamic", "a8w4_g32", "w4_g32", "w8", "int8_dynamic_per_tensor"]),
    residual=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_float_values_when_balanced_then_equal_to_rounding(seed, norm, scheme, residual, scale):
    torch.manual_seed(seed)
    inner = Normed(norm, residual=residual, readers=1 + seed % 2)
    model = nn.Sequential(inner, Gated(bias=seed % 2 == 0)).eval()
    with torch.no_grad():
        inner.norm.weight.mul_(torch.randn(WIDTH).exp() * scale)
    x = torch.randn(1, 5, WIDTH)
    kept = copy.deepcopy(model.state_dict())
    gm = torch.export.export(model, (x,)).module()
    given_scheme = scheme_named(scheme)
    run_passes(gm, (balance_channels(lambda node: given_scheme),))
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name]), name
    # each float32 weight and product is rounded once more: 2 ** -24 of it
    assert sqnr_db([model(x)], [gm(x)]) > 105


def round_rows(x: torch.Tensor) -> torch.Tensor:
    """Int8 per row with a free zero_point, the range always with 0 in it."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 255).clamp(min=1e-12)
    zero = (-128 - low / scale).round()
    return ((x / scale + zero).round().clamp(-128, 127) - zero) * scale


def in_integers(gm, x: torch.Tensor) -> torch.Tensor:
    """Run a float graph with what `int8_dynamic` rounds."""
    gm = copy.deepcopy(gm)
    for node in linears(gm):
        target = str(argument(node, "weight").target)
        weight = gm.get_parameter(target)
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        weight.data = (weight.data / scale).round() * scale
        source = argument(node, "input")
        with gm.graph.inserting_before(node):
            node.replace_input_with(source, gm.graph.call_function(round_rows, (source,)))
    gm.recompile()
    return gm(x)


@pytest.mark.parametrize(("kind", "least_gain_db"), [(Normed, 8.0), (Gated, 1.0)])
def test_int8_when_balanced_then_nearer_to_float(kind, least_gain_db):
    """Inputs are unit normal, as the estimate takes a norm's input to be; four models are drawn."""
    data = torch.randn(4, 64, WIDTH, generator=torch.Generator().manual_seed(1))
    gains = []
    for seed in range(4):
        torch.manual_seed(seed)
        drawn = kind()
        gm = torch.export.export(drawn, (data,)).module()
        plain = sqnr_db([drawn(data)], [in_integers(gm, data)])
        run_passes(gm, (ALL_DYNAMIC,))
        gains.append(sqnr_db([drawn(data)], [in_integers(gm, data)]) - plain)
    assert min(gains) > 0
    assert sum(gains) / len(gains) > least_gain_db


def test_symmetric_inputs_when_balanced_then_no_factor_is_negative(program):
    symmetric = replace(DYNAMIC, input=replace(DYNAMIC.input, symmetric=True))
    found = program(Gated(), (X,)).apply(balance_channels(lambda node: symmetric)).matches()
    assert (factors(found.gm, found.model, "down.weight", "down") > 0).all()


def test_weights_when_balanced_twice_then_as_after_once(program):
    found = program(Gated(), (X,)).apply(ALL_DYNAMIC)
    weights = {name: value.clone() for name, value in found.gm.state_dict().items()}
    result = ALL_DYNAMIC(found.gm)
    assert not result.changed
    assert "balance_channels was applied before" in {note.text for note in result.notes}
    assert all(torch.equal(found.gm.state_dict()[name], value) for name, value in weights.items())
