"""Masks of softmax in one form: booleans, apart from biases that are data."""

import copy
import math

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.graph.idioms.attention_masks import find_masks
from pt2e_quant.graph.ops import SOFTMAX, is_call
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.graph.show import show
from pt2e_quant.observers.training.fake_quantize import disable_observer
from pt2e_quant.passes.attention.mask_softmax import mask_softmax
from pt2e_quant.passes.cleanup.strip_guards import strip_guards

HEADS, N, WIDTH = 2, 5, 8


class Attention(nn.Module):
    """Attention whose scores a function changes."""

    def __init__(self, change) -> None:
        super().__init__()
        self.change = change
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.table = nn.Parameter(2 * torch.randn(2 * N, HEADS))
        self.register_buffer("places", torch.arange(N)[None] - torch.arange(N)[:, None] + N)
        self.register_buffer("causal", torch.full((N, N), -math.inf).triu(1))
        self.register_buffer("windows", torch.full((1, N, N), -100.0).triu(2))

    def bias(self):
        return self.table[self.places.flatten()].view(N, N, HEADS).permute(2, 0, 1)

    def forward(self, x, seen):
        parts = self.qkv(x).view(-1, N, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        weights = self.change(self, parts[0] @ parts[1].transpose(-1, -2), seen).softmax(-1)
        return self.out((weights @ parts[2]).transpose(1, 2).reshape(-1, N, 16))


def low(seen, number=-1e9):
    return (1.0 - seen[:, None, None, :].float()) * number


def through_a_view(m, scores, seen):
    apart = scores.view(-1, 1, HEADS, N, N) + m.windows.unsqueeze(1).unsqueeze(0)
    return apart.view(-1, HEADS, N, N)


CHANGES = {
    "filled with -inf": lambda m, s, seen: s.masked_fill(m.causal < 0, -math.inf),
    "filled with -1e4": lambda m, s, seen: s.masked_fill(seen[:, None, None, :] == 0, -1e4),
    "chosen": lambda m, s, seen: torch.where(seen[:, None, None, :] > 0, s, -1e9),
    "chosen the other way": lambda m, s, seen: torch.where(
        seen[:, None, None, :] == 0, torch.finfo(s.dtype).min, s
    ),
    "of integers": lambda m, s, seen: s + low(seen),
    "two": lambda m, s, seen: s + m.causal + low(seen, torch.finfo(s.dtype).min),
    "two, added first": lambda m, s, seen: s + (low(seen) + m.causal.clamp(min=-1e9)),
    "least of two": lambda m, s, seen: s + torch.minimum(low(seen), m.causal.clamp(min=-1e9)),
    "gated": lambda m, s, seen: (
        s + torch.full((N, N), -1e9) * (seen[:, None, None, :] == 0).to(s.dtype)
    ),
    "a bias": lambda m, s, seen: s + m.bias(),
    "a bias and a mask": lambda m, s, seen: s + m.bias() + m.causal,
    "a mask and a bias": lambda m, s, seen: s + low(seen) + m.bias(),
    "a sum of both": lambda m, s, seen: s + (m.bias() + low(seen)),
    "a constant sum of both": lambda m, s, seen: s + (m.bias() + m.windows),
    "scaled": lambda m, s, seen: (s + m.causal) * 0.5,
    "through a view": lambda m, s, seen: through_a_view(m, s + m.bias().unsqueeze(0), seen),
}


def calls(count=6, batch=3):
    draws = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        lengths = torch.randint(2, N + 1, (batch, 1), generator=draws)
        x = torch.randn(batch, N, 16, generator=draws)
        found.append((x, (torch.arange(N) < lengths).long()))
    return found


def attention(change):
    torch.manual_seed(0)
    return Attention(change).eval()


def graph_of(model):
    program = torch.export.export(model, calls()[0])
    gm = program.module()
    run_passes(gm, (strip_guards,))
    return gm


@pytest.mark.parametrize("name", CHANGES)
def test_mask_when_written_in_any_way_then_one_sum_of_booleans_is_in_front_of_softmax(name):
    model = attention(CHANGES[name])
    gm = graph_of(model)
    mask_softmax(gm)
    (softmax,) = [n for n in gm.graph.nodes if is_call(n, SOFTMAX)]
    found = find_masks(gm)
    expected = set() if name == "a bias" else {softmax.args[0]}
    assert found.masked_scores == expected, show(gm)
    with torch.no_grad():
        for given in calls():
            torch.testing.assert_close(gm(*given), model(*given), rtol=1e-5, atol=1e-6)
    assert not mask_softmax(gm).changed, show(gm)


@pytest.mark.parametrize("name", CHANGES)
def test_integer_quantizer_when_scores_are_masked_then_nothing_is_float(name):
    model = attention(CHANGES[name])
    program = torch.export.export(model, calls()[0])
    prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, calls(), progress=False))
    assert pq.audit(quantized).is_integer_only
    reference = pq.integer_reference(quantized)
    with torch.no_grad():
        expected, simulated, made = (
            torch.cat([run(*given) for given in calls()]) for run in (model, quantized, reference)
        )
    assert pq.sqnr_db(expected, made) > pq.sqnr_db(expected, simulated) - 0.5
    assert pq.sqnr_db(expected, made) > 30


@pytest.mark.parametrize("name", ["of integers", "a bias and a mask", "a sum of both"])
def test_mask_when_trained_in_integers_then_the_reference_is_equal(name):
    program = torch.export.export(attention(CHANGES[name]).train(), calls()[0])
    prepared = pq.prepare_qat_pt2e(program, pq.IntegerQuantizer(), numerics="integer").train()
    for given in calls():
        prepared(*given).square().mean().backward()
    table = next(p for n, p in prepared.named_parameters() if "table" in n)
    assert name == "of integers" or bool((table.grad != 0).any())
    prepared.eval().apply(disable_observer)
    quantized = pq.convert_pt2e(copy.deepcopy(prepared))
    assert pq.audit(quantized).islands == ()
    reference = pq.integer_reference(quantized)
    with torch.no_grad():
        for given in calls():
            assert torch.equal(reference(*given), prepared(*given))


def test_mask_when_its_batch_is_dynamic_then_every_size_runs():
    model = attention(CHANGES["a sum of both"])
    batch = {0: torch.export.Dim("batch", max=64)}
    program = torch.export.export(model, calls()[0], dynamic_shapes=(batch, batch))
    prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    reference = pq.integer_reference(
        pq.convert_pt2e(pq.calibrate(prepared, calls(), progress=False))
    )
    for batch_size in (1, 7):
        (given,) = calls(1, batch_size)
        with torch.no_grad():
            assert pq.sqnr_db(model(*given), reference(*given)) > 30


def test_mask_when_it_adds_values_of_run_time_then_it_stays():
    model = attention(lambda m, scores, seen: scores + seen.sin()[:, None, None, :].cos())
    gm = graph_of(model)
    before = show(gm)
    assert not mask_softmax(gm).changed
    assert show(gm) == before


def test_distances_when_they_are_low_without_a_gap_then_they_are_data():
    slopes = torch.tensor([4.0, 16.0]).view(HEADS, 1, 1)

    def alibi(m, scores, seen):
        return scores - slopes * (m.places - N).abs()

    gm = graph_of(attention(alibi))
    assert not mask_softmax(gm).changed
    assert not find_masks(gm).masks
