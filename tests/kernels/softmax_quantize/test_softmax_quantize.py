"""softmax_quantize's definition, its operator, and where a softmax becomes one call."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pt2e_quant.kernels.registry import Registry
from pt2e_quant.kernels.softmax_quantize.op import KERNELS, SoftmaxQuantize, cost
from pt2e_quant.kernels.softmax_quantize.reference import softmax_quantize
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from tests.kernels.lowering import calls_of, captured, fuse, qdq
from tests.kernels.operands import float_rows

STEP = 1.0 / 256


@settings(max_examples=60)
@given(st.data(), st.integers(1, 30), st.sampled_from([1.0, 0.125]))
def test_softmax_quantize_when_inputs_are_drawn_then_is_the_nearest_step_of_the_exact_probability(
    data, K, scale
):
    x = data.draw(float_rows((K,), dtypes=(torch.float32,)))
    made = softmax_quantize(x, None, scale)
    scores = [value * scale for value in x.tolist()]
    powers = [math.exp(score - max(scores)) for score in scores]
    for integer, power in zip(made.tolist(), powers, strict=True):
        exact = min(power / math.fsum(powers) * 256 - 128, 127)
        assert abs(integer - exact) <= 0.5 + 1e-3


def test_operator_when_checked_by_torch_then_is_whole():
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(4, 5).half()
    torch.library.opcheck(SoftmaxQuantize, (x, mask, 0.5), {"out_dtype": torch.uint8})
    torch.library.opcheck(SoftmaxQuantize, (x.transpose(1, 2),), {})


def test_cost_when_counted_then_has_each_tensor_once():
    assert cost(torch.zeros(2, 8), torch.zeros(8)).bytes == 64 + 32 + 16


class Attention(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, x, mask):
        return self.run(x, mask)


FORMS = {
    "alone": lambda x, mask: x.softmax(-1),
    "scaled": lambda x, mask: (x / 4.0).softmax(3),
    "scaled and masked": lambda x, mask: (x * 0.25 + mask).softmax(-1),
    "masked": lambda x, mask: (x + mask).softmax(-1),
    "in float32, as Llama's": lambda x, mask: torch.softmax(
        x * 0.25 + mask, -1, dtype=torch.float32
    ).to(x.dtype),
    "mask first": lambda x, mask: (mask + x / 4.0).softmax(-1),
}


@pytest.mark.parametrize("form", FORMS)
def test_softmax_when_quantized_then_is_one_call_within_a_step(form):
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    mask = torch.zeros(2, 1, 4, 5).masked_fill(torch.ones(4, 5).triu(1).bool(), float("-inf"))
    gm = captured(Attention(lambda x, m: qdq(FORMS[form](x, m), STEP, -128)), x, mask)
    wanted = gm(x, mask)
    fuse(gm, KERNELS, strip_guards)
    assert calls_of(gm) == ["softmax_quantize"]
    assert "aten.add" not in str(gm.graph)
    difference = (gm(x, mask) - wanted).abs()
    assert difference.max() <= STEP
    assert (difference > 0).float().mean() < 0.05


@pytest.mark.parametrize(
    "run",
    [
        lambda x, mask: x.softmax(-1),
        lambda x, mask: qdq(x.softmax(1), STEP, -128),
    ],
)
def test_softmax_when_the_kernel_has_no_such_form_then_stays(run):
    x = torch.ones(2, 3, 4, 5)
    assert calls_of(fuse(captured(Attention(run), x, x), KERNELS)) == []


def test_softmax_when_a_mask_widens_the_scores_then_it_is_added_before():
    x, mask = torch.ones(1, 3, 4, 5), torch.zeros(2, 1, 4, 5)
    gm = captured(Attention(lambda x, m: qdq((x * 0.5 + m).softmax(-1), STEP, -128)), x, mask)
    wanted = gm(x, mask)
    fuse(gm, KERNELS)
    assert torch.equal(gm(x, mask), wanted)


def test_registry_when_asked_for_the_device_then_has_softmax_quantize():
    assert "softmax_quantize" in {k.op for k in Registry.of(KERNELS[0].device)}
