"""q/dq graphs written by hand, in integers: within one step of the float arithmetic."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn import functional

from pt2e_quant.core.integer_ops.profiles import DEFAULT, PROFILES
from pt2e_quant.core.qdq import (
    DequantizePerChannel,
    DequantizePerTensor,
    QuantizePerTensor,
    is_dequantize,
    is_quantize,
)
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize
from pt2e_quant.passes.reference.forms.site import Arithmetic
from pt2e_quant.passes.reference.write_integers import write_integers

LIMITS = {torch.int8: (-128, 127), torch.uint8: (0, 255)}
KERNELS = {nn.Linear: (), nn.Conv1d: (3,), nn.Conv2d: (3, 2), nn.Conv3d: (2, 1, 2)}


class Between(nn.Module):
    """Integers in, integers out, a float operator between them."""

    def __init__(self, operator, inputs, output) -> None:
        super().__init__()
        self.operator, self.inputs, self.output = operator, inputs, output

    def forward(self, *xs: Tensor) -> Tensor:
        reals = [DequantizePerTensor(x, *qp) for x, qp in zip(xs, self.inputs, strict=True)]
        y = self.operator(*reals)
        return y if self.output is None else QuantizePerTensor(y, *self.output)


class Weighted(nn.Module):
    """A linear or convolution with integer weights, one scale each or for each channel."""

    def __init__(self, kind, channels, weight_zero, *, per_channel, bias, then=None, **options):
        super().__init__()
        shape = (channels, 4 // options.get("groups", 1), *KERNELS[kind])
        self.register_buffer("weight_q", torch.randint(-127, 128, shape).to(torch.int8))
        self.register_buffer("scale", torch.rand(channels) * 0.01 + 1e-4)
        zeros = torch.full((channels,), weight_zero, dtype=torch.int64)
        self.register_buffer("zero_point", zeros)
        self.bias = nn.Parameter(torch.randn(channels)) if bias else None
        self.per_channel, self.options, self.then = per_channel, options, then
        self.weight_zero = weight_zero
        rank = len(KERNELS[kind])
        name = f"conv{rank}d" if rank else "linear"
        self.function = getattr(functional, name)

    def forward(self, x: Tensor) -> Tensor:
        limits = (-128, 127, torch.int8)
        if self.per_channel:
            arguments = (self.scale, self.zero_point, 0, *limits)
            weight = DequantizePerChannel(self.weight_q, *arguments)
        else:
            weight = DequantizePerTensor(self.weight_q, 0.003, self.weight_zero, *limits)
        y = self.function(x, weight, self.bias, **self.options)
        return y if self.then is None else self.then(y)


@st.composite
def qparams(draw):
    dtype = draw(st.sampled_from(list(LIMITS)))
    low, high = LIMITS[dtype]
    scale = float(torch.tensor(draw(st.floats(0.005, 0.5))))
    return scale, draw(st.integers(low, high)), low, high, dtype


def integers(shape, qp):
    values = torch.randint(qp[2], qp[3] + 1, shape)
    return values.to(qp[4])


def written(model, *inputs, dynamic_shapes=None, profile=DEFAULT):
    """The exported model as it is, and in integers."""
    program = export(model.eval(), inputs, dynamic_shapes=dynamic_shapes)
    before, after = program.module(), program.module()
    arithmetic = Arithmetic(profile)
    records = run_passes(after, (strip_guards, duplicate_dequantize, write_integers(arithmetic)))
    notes = [n for r in records for n in r.notes if n.skipped]
    return before, after, [n.text for n in notes]


def operators(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def close(before, after, *inputs, step=1):
    """Outputs in integers differ by at most one; nothing is dequantized on the way."""
    assert not [n for n in after.graph.nodes if is_quantize(n) or is_dequantize(n)]
    expected, found = before(*inputs), after(*inputs)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert int((found.int() - expected.int()).abs().max()) <= step


RELUS = [None, torch.relu, functional.relu6, nn.Hardtanh(-0.5, 0.7), lambda y: y.clamp(min=-0.2)]


@settings(max_examples=15)
@pytest.mark.parametrize("kind", list(KERNELS))
@given(data=st.data())
def test_product_when_written_in_integers_then_within_one_step(kind, data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    x_qp, y_qp = data.draw(qparams()), data.draw(qparams())
    options = {}
    if kind is not nn.Linear:
        options = {
            "stride": data.draw(st.integers(1, 2)),
            "padding": data.draw(st.sampled_from([0, 1, "same", "valid"])),
            "dilation": data.draw(st.integers(1, 2)),
            "groups": data.draw(st.sampled_from([1, 2])),
        }
        if options["padding"] == "same":
            options |= {"stride": 1, "dilation": 2}
    model = Weighted(
        kind,
        6,
        data.draw(st.sampled_from([0, 3, -128])),
        per_channel=data.draw(st.booleans()),
        bias=data.draw(st.booleans()),
        then=data.draw(st.sampled_from(RELUS)),
        **options,
    )
    rank = len(KERNELS[kind])
    size = (3, 4, *[6] * rank) if rank else (3, 2, 4)
    x = integers(size, x_qp)
    before, after, skips = written(Between(model, [x_qp], y_qp), x)
    assert skips == []
    close(before, after, x)
    assert any("convolution" in op or "out_dtype" in op for op in operators(after))


TWO = {
    "add": lambda a, b: a + b,
    "add_relu": lambda a, b: torch.relu(a + b),
    "add_relu6": lambda a, b: functional.relu6(torch.add(a, b)),
    "add_alpha": lambda a, b: torch.add(a, b, alpha=2),
    "sub": lambda a, b: a - b,
    "sub_relu": lambda a, b: torch.relu(torch.sub(a, b, alpha=0.5)),
    "cat": lambda a, b: torch.cat([a, b], 1),
}
ONE = {
    "max_pool2d": lambda a: functional.max_pool2d(a, 3, 2, 1),
    "adaptive_avg_pool2d": lambda a: functional.adaptive_avg_pool2d(a, 1),
    "mean": lambda a: a.mean((2, 3)),
    "mean_keepdim": lambda a: a.mean(-1, keepdim=True),
    "relu": torch.relu,
    "requantize": lambda a: a,
    "reshape": lambda a: a.reshape(2, -1),
    "permute": lambda a: a.permute(0, 2, 3, 1),
    "slice": lambda a: a[:, 1:],
}


@settings(max_examples=10)
@pytest.mark.parametrize("name", list(TWO))
@given(data=st.data())
def test_sum_when_written_in_integers_then_within_one_step(name, data):
    a_qp, b_qp, y_qp = (data.draw(qparams()) for _ in range(3))
    inputs = integers((2, 3, 4, 4), a_qp), integers((2, 3, 4, 4), b_qp)
    before, after, skips = written(Between(TWO[name], [a_qp, b_qp], y_qp), *inputs)
    assert skips == []
    close(before, after, *inputs)


@settings(max_examples=8)
@pytest.mark.parametrize("name", list(ONE))
@given(data=st.data())
def test_pool_or_move_when_written_in_integers_then_within_one_step(name, data):
    x_qp = data.draw(qparams())
    y_qp = data.draw(st.one_of(st.just(x_qp), qparams()))
    x = integers((2, 3, 4, 4), x_qp)
    before, after, skips = written(Between(ONE[name], [x_qp], y_qp), x)
    assert skips == []
    close(before, after, x)
    is_moved = name in ("reshape", "permute", "slice", "max_pool2d", "requantize")
    if is_moved and x_qp == y_qp:
        assert torch.equal(before(x), after(x))
        assert len(operators(after)) <= 1


@settings(max_examples=5)
@pytest.mark.parametrize("profile", list(PROFILES.values()), ids=list(PROFILES))
@given(data=st.data())
def test_profile_when_any_is_chosen_then_within_one_step(profile, data):
    """Two roundings of GEMMLOWP and the half step of TOSA_DOUBLE are still within one step."""
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    a_qp, b_qp, y_qp = (data.draw(qparams()) for _ in range(3))
    inputs = integers((2, 4, 5, 5), a_qp), integers((2, 4, 5, 5), b_qp)
    conv = Weighted(nn.Conv2d, 6, 0, per_channel=True, bias=True, then=torch.relu)
    for operator, count in [
        (conv, 1), (TWO["add"], 2), (TWO["sub_relu"], 2), (TWO["cat"], 2), (ONE["mean"], 1),
        (ONE["requantize"], 1),
    ]:  # fmt: skip
        model = Between(operator, [a_qp, b_qp][:count], y_qp)
        before, after, skips = written(model, *inputs[:count], profile=profile)
        assert skips == []
        close(before, after, *inputs[:count])
        if profile.requantization.is_fixed and y_qp not in (a_qp, b_qp):
            assert any("integer_rescale" in op for op in operators(after))


X = (0.05, 3, -128, 127, torch.int8)


def test_result_when_it_stays_float_then_the_accumulator_times_its_scale():
    torch.manual_seed(0)
    model = Weighted(nn.Linear, 6, 0, per_channel=True, bias=True)
    x = integers((5, 4), X)
    before, after, _ = written(Between(model, [X], None), x)
    assert "out_dtype" in operators(after)
    with torch.no_grad():
        steps = (after(x) - before(x)).abs() / (X[0] * model.scale)
    assert float(steps.max()) < 0.51  # the bias is rounded to a step of the accumulator


def test_write_integers_when_sizes_are_dynamic_then_other_sizes_match():
    torch.manual_seed(0)
    model = Weighted(nn.Conv2d, 6, 0, per_channel=True, bias=True, then=torch.relu)
    shapes = {"xs": ({0: Dim("n", max=8), 2: Dim("h", min=4, max=64)},)}
    x = integers((2, 4, 9, 7), X)
    before, after, _ = written(Between(model, [X], X), x, dynamic_shapes=shapes)
    for size in ((2, 4, 9, 7), (5, 4, 20, 7)):
        close(before, after, integers(size, X))


class Unknown(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return QuantizePerTensor(torch.cumprod(DequantizePerTensor(a, *X), 0), *X)


class RunTime(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        y = functional.linear(DequantizePerTensor(a, *X), DequantizePerTensor(b, *X))
        return QuantizePerTensor(y, *X)


A, B = torch.zeros(2, 4, dtype=torch.int8), torch.zeros(4, 4, dtype=torch.int8)


@pytest.mark.parametrize(
    ("model", "inputs", "reason"),
    [
        (RunTime(), (A, B), "weight or its scale is no constant of this graph"),
        (
            Between(torch.atan2, [X, X], X),
            (A, A),
            "a function of more than one tensor",
        ),
        (
            Between(lambda a, b: a + b, [(1e9, *X[1:]), X], (1e-2, *X[1:])),
            (A, A),
            "the summands' scales are far above the output's",
        ),
    ],
)
def test_write_integers_when_it_declines_then_says_why_and_leaves_the_qdq(model, inputs, reason):
    before, after, skips = written(model, *inputs)
    assert any(reason in text for text in skips)
    assert operators(after) == operators(before) or len(operators(after)) == len(operators(before))
    assert torch.equal(before(*inputs), after(*inputs))


def test_write_integers_when_unknown_or_run_twice_then_changes_nothing(program):
    p = program(Unknown(), (A,))
    assert not p.apply(duplicate_dequantize, write_integers()).changed
    torch.manual_seed(0)
    model = Between(Weighted(nn.Linear, 6, 0, per_channel=False, bias=True), [X], X)
    q = program(model, (integers((2, 4), X),))
    q.apply(duplicate_dequantize, write_integers(), drop_dead_constants)
    q.is_idempotent(write_integers())


def test_linear_when_written_in_integers_then_reads_as_the_definition(program):
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("w_q", torch.tensor([[1, 2], [-3, 4]], dtype=torch.int8))
            self.bias = nn.Parameter(torch.tensor([0.5, -1.0]))

        def forward(self, x: Tensor) -> Tensor:
            real = DequantizePerTensor(x, 0.5, 3, -128, 127, torch.int8)
            weight = DequantizePerTensor(self.w_q, 0.25, 0, -128, 127, torch.int8)
            y = torch.relu(functional.linear(real, weight, self.bias))
            return QuantizePerTensor(y, 0.125, -5, -128, 127, torch.int8)

    p = program(Plain(), (torch.tensor([[3, 4]], dtype=torch.int8),))
    p.apply(duplicate_dequantize, write_integers(), drop_dead_constants)
    p.shows(
        """
        x: i8[1, 2] = input
        _to_copy: i16[1, 2] = _to_copy(x, dtype=i16)
        sub_: i16[1, 2] = sub_(_to_copy, 3)
        _to_copy_1: i16[2, 2] = _to_copy(w_q, dtype=i16)
        out_dtype: i32[1, 2] = out_dtype(aten.linear.default, i32, sub_, _to_copy_1, None)
        add_: i32[1, 2] = add_(out_dtype, linear_bias_q)
        _to_copy_2: f32[1, 2] = _to_copy(add_, dtype=f32)
        mul_: f32[1, 2] = mul_(_to_copy_2, 1.0)
        round_: f32[1, 2] = round_(mul_)
        clamp_: f32[1, 2] = clamp_(round_, min=0, max=132)
        add__1: f32[1, 2] = add_(clamp_, -5)
        _to_copy_3: i8[1, 2] = _to_copy(add__1, dtype=i8)
        return (_to_copy_3)
        """
    )
    x = torch.tensor([[3, 4]], dtype=torch.int8)
    # (0, 1) . weight = (2, 4), bias / 0.125 = (4, -8); a step of the sum is one of the output
    assert p.gm(x).tolist() == [[2 + 4 - 5, -5]]
