"""Every form against the float operator between q/dq: within one step, or its stated bound."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.integer_ops.profiles import PROFILES
from pt2e_quant.core.qdq import (
    DequantizePerChannel,
    DequantizePerGroup,
    DequantizePerTensor,
    DequantizePerToken,
    QuantizePerTensor,
)
from pt2e_quant.graph.idioms.rms_norm import RmsNorm
from tests.passes.reference.forms.between import (
    IMAGE,
    LIMITS,
    A,
    B,
    Between,
    Y,
    integers,
    qp,
    steps_apart,
    written,
)

aten = torch.ops.aten

ONE = {
    "avg_pool2d": lambda x: functional.avg_pool2d(x, 3, 2, 1),
    "avg_pool2d_valid": lambda x: functional.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avg_pool2d_ceil": lambda x: functional.avg_pool2d(x, (2, 3), 2, ceil_mode=True),
    "avg_pool2d_divisor": lambda x: functional.avg_pool2d(x, 2, divisor_override=3),
    "avg_pool1d": lambda x: functional.avg_pool1d(x.flatten(2), 4, 3, 1),
    "adaptive": lambda x: functional.adaptive_avg_pool2d(x, (4, 3)),
    "adaptive_one": lambda x: functional.adaptive_avg_pool2d(x, 1),
    "mean": lambda x: x.mean((-1, -2)),
    "mean_all": lambda x: x.mean(),
    "sum": lambda x: x.sum((1, -1)),
    "sum_kept": lambda x: x.sum(2, keepdim=True, dtype=torch.float32),
    "sum_all": lambda x: x.sum() / 64.0,
    "cumsum": lambda x: x.cumsum(2),
    "glu": lambda x: functional.glu(x, 1),
    "linear": lambda x: functional.interpolate(x.flatten(2), 20, mode="linear"),
}
EXACT = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "elu": lambda x: functional.elu(x, 0.7),
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.1),
    "exp": torch.exp,
    "log": torch.log,
    "rsqrt": torch.rsqrt,
    "sqrt": torch.sqrt,
    "pow": lambda x: x**2,
    "abs": torch.abs,
    "mish": functional.mish,
    "softplus": functional.softplus,
    "log_sigmoid": functional.logsigmoid,
    "gelu_": aten.gelu_,
    "add_number": lambda x: x + 0.4,
    "number_minus": lambda x: 1.0 - x,
    "mul_number": lambda x: x * 0.3,
    "div_number": lambda x: x / 3.0,
}
MOVES = {
    "max_pool2d": lambda x: functional.max_pool2d(x, 3, 2, 1),
    "max_pool1d": lambda x: functional.max_pool1d(x.flatten(2), 3, 2, 1),
    "flip": lambda x: x.flip(2),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "expand": lambda x: x[:, :1].expand(2, 4, 9, 7),
    "pixel_shuffle": lambda x: functional.pixel_shuffle(x, 2),
    "nearest": lambda x: functional.interpolate(x, scale_factor=2, mode="nearest"),
    "nearest by a factor that float32 rounds": lambda x: functional.interpolate(
        x, scale_factor=41, mode="nearest"
    ),
    "nearest exact": lambda x: functional.interpolate(x, scale_factor=1.5, mode="nearest-exact"),
    "pad": lambda x: functional.pad(x, (1, 2)),
    "pad_number": lambda x: functional.pad(x, (1, 2), value=0.77),
    "pad_reflect": lambda x: functional.pad(x, (1, 2, 2, 1), mode="reflect"),
    "amax": lambda x: x.amax((2, 3)),
    "masked_fill": lambda x: x.masked_fill(torch.ones(7, dtype=torch.bool), -1e9),
    "stack": lambda x: torch.stack([x, x], 1),
    "clone": lambda x: x.clone(),
}
TWO = {
    "mul": torch.mul,
    "div": torch.div,
    "matmul": lambda a, b: a @ b.transpose(-1, -2),
    "bmm": lambda a, b: torch.bmm(a.flatten(0, 1), b.flatten(0, 1).mT),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": lambda a, b: torch.where(torch.arange(7) > 3, a, b),
}


@pytest.mark.parametrize("name", list(ONE))
@pytest.mark.parametrize("profile", ["default", "tflite", "onednn"])
def test_averages_when_written_then_within_one_step(name, profile):
    for output in (A, Y):
        operator = ONE[name]
        x = integers(IMAGE, A)
        if name == "avg_pool1d":
            x, operator = x.flatten(2), lambda y: functional.avg_pool1d(y, 4, 3, 1)
        if name == "linear":
            x, operator = x.flatten(2), lambda y: functional.interpolate(y, 20, mode="linear")
        if name == "sum_all":
            operator, output = torch.sum, qp(3.0, -5)
        model = Between(operator, [A], output)
        assert steps_apart(model, x, profile=PROFILES[profile]) <= 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("name", list(EXACT))
def test_tables_when_8_bits_then_equal_the_qdq_graph(name, dtype):
    x_qp = qp(0.04, 7, dtype)
    every = torch.arange(*LIMITS[dtype]).to(dtype)
    if name in ("log", "sqrt", "rsqrt"):  # of positive numbers: the others are NaN
        every = every[every > 7]
    assert steps_apart(Between(EXACT[name], [x_qp], qp(0.02, -3)), every) == 0


WIDE = ["sigmoid", "tanh", "gelu", "silu", "hardswish", "elu", "exp", "softplus"]


@pytest.mark.parametrize("name", WIDE)
def test_tables_when_16_bits_then_as_near_as_their_note_says(name):
    x_qp, y_qp = qp(1e-4, 0, torch.int16), qp(8e-4, 0, torch.int16)
    every = torch.arange(-32768, 32768).to(torch.int16)
    before, after, notes = written(Between(EXACT[name], [x_qp], y_qp), every)
    error = (after(every).int() - before(every).int()).abs().max().item()
    assert f"at most {error} steps" in notes[-1].text
    # of 65,536; the slope of hardswish breaks between entries
    assert error <= (2 if name == "hardswish" else 1)


@pytest.mark.parametrize("name", list(MOVES))
def test_moves_when_written_then_exact_or_within_one_step(name):
    shape = (2, 4, 63) if name == "max_pool1d" else IMAGE
    operator = MOVES[name]
    if name == "max_pool1d":
        operator = lambda x: functional.max_pool1d(x, 3, 2, 1)  # noqa: E731
    if name == "expand":
        shape, operator = (2, 1, 9, 7), lambda x: x.expand(2, 4, 9, 7)
    x = integers(shape, A)
    assert steps_apart(Between(operator, [A], A), x) == 0
    assert steps_apart(Between(operator, [A], Y), x) <= 1


@pytest.mark.parametrize("name", list(TWO))
def test_two_tensors_when_written_then_within_one_step(name):
    operator, shape = TWO[name], (2, 4, 9, 7)
    second = shape
    if name == "matmul":
        operator, second = torch.matmul, (2, 4, 7, 9)
    if name == "bmm":
        operator, shape, second = torch.bmm, (3, 9, 7), (3, 7, 5)
    inputs = integers(shape, A), integers(second, B, seed=1)
    for profile in ("default", "tosa"):
        model = Between(operator, [A, B], Y)
        assert steps_apart(model, *inputs, profile=PROFILES[profile]) <= 1


def test_products_beyond_int32_when_fixed_then_within_one_step():
    wide = qp(1e-4, 77, torch.int16)
    inputs = integers(IMAGE, wide), integers(IMAGE, wide, seed=1)
    for profile in ("default", "tosa", "tflite"):
        model = Between(torch.mul, [wide, wide], qp(4e-4, 3, torch.int16))
        assert steps_apart(model, *inputs, profile=PROFILES[profile]) <= 1


def test_constant_when_float_then_becomes_16_bits_within_one_step():
    scale = torch.rand(4, 1, 1) + 0.5
    for operator in (lambda x: x * scale, lambda x: x + scale, lambda x: x - scale):
        assert steps_apart(Between(operator, [A], Y), integers(IMAGE, A)) <= 1


class Transposed(nn.Module):
    def __init__(self, *, per_channel, rank=2, **options) -> None:
        super().__init__()
        shape = (4, 6 // options.get("groups", 1), *[3] * rank)
        self.register_buffer("w_q", torch.randint(-127, 128, shape).to(torch.int8))
        self.register_buffer("scale", torch.rand(shape[1]) * 0.01 + 1e-4)
        self.register_buffer("zero", torch.zeros(shape[1], dtype=torch.int64))
        self.bias = nn.Parameter(torch.randn(6))
        self.per_channel, self.options = per_channel, options
        self.function = getattr(functional, f"conv_transpose{rank}d")

    def forward(self, x: Tensor) -> Tensor:
        limits = (-128, 127, torch.int8)
        if self.per_channel:
            weight = DequantizePerChannel(self.w_q, self.scale, self.zero, 1, *limits)
        else:
            weight = DequantizePerTensor(self.w_q, 0.003, 2, *limits)
        return self.function(x, weight, self.bias, **self.options)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("rank", [1, 2])
def test_transposed_convolutions_when_written_then_within_one_step(rank, per_channel):
    torch.manual_seed(0)
    options = {"stride": 2, "padding": 1, "output_padding": 1}
    model = Transposed(per_channel=per_channel, rank=rank, **options)
    x = integers((2, 4, *[5] * rank), A)
    assert steps_apart(Between(model, [A], Y), x) <= 1
    grouped = Transposed(per_channel=False, rank=rank, groups=2, **options)
    assert steps_apart(Between(grouped, [A], Y), x) <= 1


class GroupLinear(nn.Module):
    def __init__(self, *, is_dynamic=False) -> None:
        super().__init__()
        self.register_buffer("w_q", torch.randint(-8, 8, (6, 64)).to(torch.int8))
        self.register_buffer("scale", torch.rand(6, 4) * 0.05 + 1e-3)
        self.register_buffer("zero", torch.zeros(6, 4, dtype=torch.int64))
        self.bias = nn.Parameter(torch.randn(6))
        self.is_dynamic = is_dynamic

    def forward(self, x: Tensor, *qparams: Tensor) -> Tensor:
        if self.is_dynamic:
            x = DequantizePerToken(x, *qparams, -128, 127, torch.int8, torch.float32)
        limits = (-8, 7, torch.int8, 16, torch.float32)
        weight = DequantizePerGroup(self.w_q, self.scale, self.zero, *limits)
        return functional.linear(x, weight, self.bias)


def test_groups_when_static_then_within_one_step():
    torch.manual_seed(0)
    for profile in ("default", "tflite"):
        model = Between(GroupLinear(), [A], Y)
        assert steps_apart(model, integers((3, 64), A), profile=PROFILES[profile]) <= 1


def test_groups_and_tokens_when_dynamic_then_float_rounding_apart():
    torch.manual_seed(0)
    x, scales = integers((3, 64), A), torch.rand(3, 1) * 0.05 + 0.01
    zeros = torch.tensor([[3], [-7], [0]])
    model = GroupLinear(is_dynamic=True)
    assert steps_apart(model, x, scales, zeros) < 1e-4


class Embedding(nn.Module):
    def __init__(self, *, per_channel) -> None:
        super().__init__()
        self.register_buffer("w_q", torch.randint(-127, 128, (11, 6)).to(torch.int8))
        self.register_buffer("scale", torch.rand(11) * 0.05 + 1e-3)
        self.register_buffer("zero", torch.zeros(11, dtype=torch.int64))
        self.per_channel = per_channel

    def forward(self, index: Tensor) -> Tensor:
        limits = (-128, 127, torch.int8)
        if self.per_channel:
            weight = DequantizePerChannel(self.w_q, self.scale, self.zero, 0, *limits)
            return functional.embedding(index, weight)
        weight = DequantizePerTensor(self.w_q, 0.02, 3, *limits)
        return QuantizePerTensor(functional.embedding(index, weight), *Y)


def test_embeddings_when_written_then_rows_of_integers():
    index = torch.tensor([[3, 10], [0, 5]])
    assert steps_apart(Embedding(per_channel=True), index) == 0
    assert steps_apart(Embedding(per_channel=False), index) <= 1


@pytest.mark.parametrize("stored", [torch.int8, torch.int16])
@pytest.mark.parametrize(("scale", "length"), [(1e-6, 300), (1e-4, 5), (3e-4, 64), (0.01, 1000)])
def test_softmax_when_written_then_a_rounding_from_the_real_one(scale, length, stored):
    # Scores that span little give a small greatest result, and so a small scale.
    for dtype in (torch.int8, torch.int16):
        x_qp = qp(scale, 4, dtype)
        x = integers((3, length), x_qp)
        real = torch.softmax((x.double() - 4) * scale, -1)
        zero, low, high, _ = y_rest = qp(1.0, 0, stored)[1:]
        y_scale = real.max().item() / (high - low if stored is torch.int8 else high)
        y_rest = (low if stored is torch.int8 else zero, *y_rest[1:])
        model = Between(lambda v: torch.softmax(v, -1), [x_qp], (y_scale, *y_rest))
        assert steps_apart(model, x) <= 1
        _, after, _ = written(model, x)
        error = (after(x).double() - y_rest[0] - real / y_scale).abs().max().item()
        assert error <= 0.5 + (4e-6 * real.max().item() + 2.0**-29) / y_scale


@pytest.mark.parametrize("stored", [torch.int8, torch.int16])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize(("scale", "length"), [(1e-4, 5), (0.05, 10), (0.2, 300), (0.01, 1000)])
def test_log_softmax_when_written_then_a_rounding_from_the_real_one(scale, length, dtype, stored):
    x_qp = qp(scale, 4, dtype)
    x = integers((3, length), x_qp)
    real = torch.log_softmax((x.double() - 4) * scale, -1)
    low, high = LIMITS[stored]
    y_scale = -real.min().item() / (high - low)
    model = Between(lambda v: torch.log_softmax(v, -1), [x_qp], qp(y_scale, high, stored))
    assert steps_apart(model, x) <= 1
    _, after, _ = written(model, x)
    error = (after(x).double() - high - real / y_scale).abs().max().item()
    multiplier = (high - low) * 2.0**-25  # of 16-bit scores; more bits of 8-bit ones
    assert error <= 0.5 + 1e-5 / y_scale + multiplier


@pytest.mark.parametrize("profile", ["default", "tflite", "xnnpack"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize("operator", [torch.var, torch.std])
def test_deviations_when_written_then_a_rounding_from_the_real_one(operator, dtype, profile):
    x_qp = qp(0.03, 5, dtype)
    x = integers((4, 9, 70), x_qp)
    real = operator((x.double() - 5) * 0.03, dim=(0, 2), correction=2)
    y_scale = real.max().item() / 120
    model = Between(lambda v: operator(v, dim=(0, 2), correction=2), [x_qp], qp(y_scale, -3))
    assert steps_apart(model, x, profile=PROFILES[profile]) <= 1
    _, after, _ = written(model, x, profile=PROFILES[profile])
    assert (after(x).double() + 3 - real / y_scale).abs().max().item() <= 0.5 + 2e-3


NORMS = {
    "layer_norm": nn.LayerNorm(48),
    "layer_norm_plain": nn.LayerNorm(48, elementwise_affine=False),
    "group_norm": nn.GroupNorm(3, 6),
    "rms_norm": nn.RMSNorm(48, eps=1e-5),
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize("name", list(NORMS))
def test_norms_when_written_then_within_one_step(name, dtype):
    torch.manual_seed(0)
    norm = NORMS[name]
    if getattr(norm, "weight", None) is not None:
        nn.init.normal_(norm.weight, 1.0, 0.5)
    x_qp = qp(0.03 if dtype is torch.int8 else 1e-4, 9, dtype)
    x = integers((2, 6, 48), x_qp)
    x[0, 0] = x[0, 0] // 64  # a row of little variance
    assert steps_apart(Between(norm, [x_qp], Y), x) <= 1
    if dtype is torch.int16:
        assert steps_apart(Between(norm, [x_qp], qp(2e-4, 0, torch.int16)), x) <= 2


def test_rms_norm_when_composite_then_written_within_one_step():
    model = Between(lambda x: RmsNorm(x, [-1], 1e-5), [A], Y)
    assert steps_apart(model, integers((3, 48), A)) <= 1


class LongSum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.full((1, 40_000), -127, dtype=torch.int8))

    def forward(self, a: Tensor) -> Tensor:
        return functional.linear(a, DequantizePerTensor(self.w, *A))


def test_sum_when_beyond_int32_then_refused_by_name_and_held_by_64_bits():
    wide = (1e-4, -32768, -32768, 32767, torch.int16)
    model = Between(LongSum(), [wide], qp(20.0, 0))
    x = integers((1, 40_000), wide)
    with pytest.raises(UnsupportedError, match=r"may not fit in int32(.|\n)*linear(.|\n)*64"):
        written(model, x)
    assert steps_apart(model, x, bits=64) <= 1
