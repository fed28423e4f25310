"""Sums, gates, quotients and resizes against the float operator, and against Python's integers."""

import math

import pytest
import torch
from torch.nn import functional

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.integer_ops.profiles import PROFILES
from tests.passes.reference.forms.between import (
    IMAGE,
    A,
    B,
    Between,
    Y,
    integers,
    qp,
    steps_apart,
    written,
)

RESIZES = {
    "twice": {"scale_factor": 2, "mode": "bilinear"},
    "corners": {"size": (5, 16), "mode": "bilinear", "align_corners": True},
    "factors": {"scale_factor": (0.7, 1.3), "mode": "bilinear"},
    "bicubic": {"scale_factor": 1.5, "mode": "bicubic"},
}


@pytest.mark.parametrize("name", list(RESIZES))
def test_resizes_when_written_then_within_one_step(name):
    model = Between(lambda x: functional.interpolate(x, **RESIZES[name]), [A], A)
    assert steps_apart(model, integers(IMAGE, A)) <= 1
    wide = qp(1e-4, 77, torch.int16)
    model = Between(model.operator, [wide], wide)
    for profile in ("default", "tosa"):
        assert steps_apart(model, integers(IMAGE, wide), profile=PROFILES[profile]) <= 1


def test_trilinear_when_written_then_within_one_step():
    grow = lambda x: functional.interpolate(x, scale_factor=2, mode="trilinear")  # noqa: E731
    for kind in (A, qp(1e-4, 77, torch.int16)):
        assert steps_apart(Between(grow, [kind], kind), integers((1, 2, 3, 4, 3), kind)) <= 1


def rescaled(total, real, output):
    """An accumulator times a real factor as TOSA has it, in Python's integers."""
    fraction, exponent = math.frexp(real)
    multiplier, shift = round(fraction * 2**31), 31 - exponent
    steps = (total * multiplier + (1 << (shift - 1)) >> shift) + output[1]
    return min(max(steps, output[2]), output[3])


def test_sum_when_tosa_then_equal_to_python_integers():
    x = integers((5, 6, 7), A)
    model = Between(lambda v: v.sum((0, 2)), [A], Y)
    _, after, _ = written(model, x, profile=PROFILES["tosa"])
    real = torch.tensor(A[0]).double() / torch.tensor(Y[0]).double()
    expected = [
        rescaled(sum(v - A[1] for v in x[:, at].flatten().tolist()), real.item(), Y)
        for at in range(6)
    ]
    assert after(x).tolist() == expected


def test_glu_when_tosa_then_equal_to_python_integers():
    x = integers((1, 12), A)
    _, after, _ = written(Between(functional.glu, [A], B), x, profile=PROFILES["tosa"])
    first, second = x[0].tolist()[:6], x[0].tolist()[6:]
    gates = [round(65535 / (1 + math.exp(-(v - A[1]) * A[0]))) for v in second]
    real = (torch.tensor(A[0]).double() / 65535 / torch.tensor(B[0]).double()).item()
    pairs = zip(first, gates, strict=True)
    assert after(x)[0].tolist() == [rescaled((v - A[1]) * gate, real, B) for v, gate in pairs]


def test_glu_when_16_bits_then_within_one_step():
    wide = qp(2e-4, 77, torch.int16)
    model = Between(lambda x: functional.glu(x, 2), [wide], wide)
    assert steps_apart(model, integers((2, 3, 4, 50), wide)) <= 1


def test_division_when_by_zero_then_the_limits():
    x, y = integers((4, 64), A), torch.full((4, 64), B[1], dtype=torch.int8)
    _, after, _ = written(Between(torch.div, [A, B], Y), x, y)
    steps = x.int() - A[1]
    expected = torch.where(steps > 0, 127, torch.where(steps < 0, -128, Y[1]))
    assert torch.equal(after(x, y).int(), expected)


def test_sum_when_a_dimension_is_dynamic_then_within_one_step():
    dynamic = {"xs": ({0: torch.export.Dim("n")},)}
    x = integers((9, 4), A)
    for profile in ("default", "tosa"):
        model = Between(lambda v: v.sum(0), [A], Y)
        assert steps_apart(model, x, profile=PROFILES[profile], shapes=dynamic) <= 1


def test_sum_when_beyond_int32_and_64_bits_then_within_one_step():
    wide = (1e-4, -32768, -32768, 32767, torch.int16)
    x = torch.full((1, 40_000), 32767, dtype=torch.int16)
    for operator in (lambda v: v.sum(1), lambda v: v.mean(1)):
        model = Between(operator, [wide], qp(3000.0, 0))
        for profile in ("default", "tosa"):
            assert steps_apart(model, x, profile=PROFILES[profile], bits=64) <= 1


@pytest.mark.parametrize("dim", [0, -1])
def test_cumulative_sum_when_int32_is_too_small_then_refused_and_exact_in_64_bits(dim):
    wide = (1e-4, -32768, -32768, 32767, torch.int16)
    x = torch.full((40_000,), 32767, dtype=torch.int16)
    model = Between(lambda v: v.cumsum(dim), [wide], (1e-1, 0, -32768, 32767, torch.int16))
    with pytest.raises(UnsupportedError, match="may not fit in int32"):
        written(model, x)
    assert steps_apart(model, x, bits=64) <= 1


def test_cumulative_sum_when_tosa_then_equal_to_python_integers():
    x, output = integers(IMAGE, A), qp(A[0] * 3, -3, torch.int16)
    _, after, _ = written(Between(lambda v: v.cumsum(1), [A], output), x, profile=PROFILES["tosa"])
    scales = [torch.tensor(s, dtype=torch.float32).double().item() for s in (A[0], output[0])]
    expected = [
        rescaled(total, scales[0] / scales[1], output)
        for total in (x.long() - A[1]).cumsum(1).flatten().tolist()
    ]
    assert after(x).flatten().tolist() == expected


@pytest.mark.parametrize("kind", [A, qp(1e-4, 77, torch.int16)], ids=["int8", "int16"])
@pytest.mark.parametrize("dims", [[-1], [1, 2, 3], None])
def test_vector_norm_when_tosa_then_equal_to_python_integers(kind, dims):
    x, output = integers(IMAGE, kind), qp(kind[0] * 3, -3, torch.int16)
    model = Between(lambda v: torch.linalg.vector_norm(v, 2, dims), [kind], output)
    assert steps_apart(model, x) <= 1
    _, after, _ = written(model, x, profile=PROFILES["tosa"])
    rows = x.long() - kind[1]
    total = (rows * rows).sum(dims or [0, 1, 2, 3])
    bits = 30 - -(-int(x.numel() // total.numel() * model_reach(kind) ** 2).bit_length() // 2)
    scales = (torch.tensor(s, dtype=torch.float32).double().item() for s in (kind[0], output[0]))
    ratio = next(scales) * 2.0**-bits / next(scales)
    expected = [
        rescaled(math.isqrt(v << (2 * bits)), ratio, output) for v in total.reshape(-1).tolist()
    ]
    assert after(x).flatten().tolist() == expected


def model_reach(kind):
    """The greatest abs(q - zero_point)."""
    return max(kind[3] - kind[1], kind[1] - kind[2])


def test_vector_norm_when_it_is_no_euclidean_one_then_it_stays_float():
    model = Between(lambda v: torch.linalg.vector_norm(v, 1), [A], qp(3.0, -5))
    _, _, notes = written(model, integers(IMAGE, A))
    assert "it is no Euclidean norm" in [n.text for n in notes if n.skipped]


def test_move_when_it_reads_the_shape_of_a_quantized_tensor_then_exact():
    inputs = integers((2, 1, 9, 7), A), integers(IMAGE, B, seed=1)
    assert steps_apart(Between(lambda x, y: x.expand_as(y), [A, B], A), *inputs) == 0
