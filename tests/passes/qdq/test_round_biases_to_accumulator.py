"""Float biases become multiples of the accumulator's step."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from pt2e_quant.passes.qdq.round_biases_to_accumulator import round_biases_to_accumulator

_lib = torch.ops.quantized_decomposed
_LIMITS = (-127, 127, torch.int8)


class Quantized(nn.Module):
    """An int8 linear with one scale per row and a float bias."""

    def __init__(self, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("w", torch.arange(-6, 6, dtype=torch.int8).reshape(3, 4))
        self.register_buffer("s", torch.tensor([0.25, 0.5, 0.125]))
        self.register_buffer("z", torch.zeros(3, dtype=torch.int64))
        self.bias = bias if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        w = _lib.dequantize_per_channel(self.w, self.s, self.z, 0, *_LIMITS)
        q = _lib.quantize_per_tensor(x, 0.5, 3, -128, 127, torch.int8)
        x = _lib.dequantize_per_tensor(q, 0.5, 3, -128, 127, torch.int8)
        return nn.functional.linear(x, w, self.bias)


BIAS = torch.tensor([0.3, -0.71, 0.05])


def _graph(model: nn.Module):
    return export(model.eval(), (torch.randn(2, 4),)).module(check_guards=False)


def test_bias_when_rounded_then_an_exact_multiple_of_the_step():
    model = Quantized(BIAS)
    gm = _graph(model)
    result = round_biases_to_accumulator(gm)
    assert [note.text for note in result.notes] == ["bias: rounded to the accumulator's step"]
    steps = gm.bias.detach() / (0.5 * model.s)
    assert torch.equal(steps, steps.round())
    assert ((gm.bias.detach() - BIAS).abs() <= 0.5 * 0.5 * model.s).all()


def test_bias_when_rounded_then_the_users_own_is_not_written():
    model = Quantized(BIAS.clone())
    round_biases_to_accumulator(_graph(model))
    assert torch.equal(model.bias.detach(), BIAS)


def test_output_when_biases_are_rounded_then_within_half_a_step():
    model = Quantized(BIAS)
    gm = _graph(model)
    x = torch.randn(2, 4)
    before = gm(x)
    round_biases_to_accumulator(gm)
    assert ((gm(x) - before).abs() <= 0.5 * 0.5 * model.s + 1e-6).all()


def test_bias_when_shared_then_rounded_for_each_reader():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Quantized(BIAS)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) + self.a.bias

    gm = _graph(Two())
    x = torch.randn(2, 4)
    before = gm(x)
    round_biases_to_accumulator(gm)
    assert torch.equal(gm.a.bias.detach(), BIAS)
    assert (gm(x) - before).abs().max() <= 0.25 * 0.5 + 1e-6


@pytest.mark.parametrize(
    "model", [Quantized(None), nn.Linear(4, 3)], ids=["no bias", "float operands"]
)
def test_round_biases_when_it_does_not_apply_then_declined(model):
    assert not round_biases_to_accumulator(_graph(model)).changed


def test_round_biases_when_run_twice_then_the_second_changes_nothing():
    gm = _graph(Quantized(BIAS))
    round_biases_to_accumulator(gm)
    assert not round_biases_to_accumulator(gm).changed
