"""Bias correction: a biased rounding, what it leaves, and the same from batch norms."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.output_moments import OutputMoments
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.passes.algorithms import BiasCorrection, bias_correction
from pt2e_quant.passes.algorithms.bias_correction import certain_part, clipped_mean

pytestmark = pytest.mark.usefixtures("unmeasured")


class Biased(nn.Module):
    """A linear whose weights all lie 0.4 of a w3 step above an integer, on inputs of mean 2."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 8)
        with torch.no_grad():
            self.layer.weight.copy_(torch.full((8, 64), 1.4))
            self.layer.weight[:, 0] = 3.0  # w3 takes -3 .. 3: the step is 1

    def forward(self, x):
        return self.layer(x)


class Normed(nn.Module):
    """Convolutions behind a batch norm with a relu; the second has no padding."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 8, 3, bias=bias)
        nn.init.uniform_(self.norm.weight, 0.5, 2.0)
        nn.init.normal_(self.norm.bias, 1.0, 0.5)
        self.train()
        self.norm.momentum = None  # the mean over all batches
        for x in images(32, seed=9):
            self(x)
        self.eval()

    def forward(self, x):
        return self.second(functional.relu(self.norm(self.first(x))))


def rows(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [2 + torch.randn(4, 64, generator=generator) for _ in range(count)]


def images(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 3, 12, 12, generator=generator) for _ in range(count)]


def mean_error(model, gm, data) -> float:
    """The greatest magnitude of a channel's mean error."""
    with torch.no_grad():
        errors = torch.cat([gm(x) - model(x) for x in data])
    return float(errors.transpose(0, 1).flatten(1).mean(1).abs().max())


def test_mean_error_when_rounding_is_biased_then_gone(quantized):
    model, held = Biased(), rows(64, seed=1)
    plain = mean_error(model, quantized(model, rows(16), "w3"), held)
    assert plain > 0.5
    gm = quantized(model, rows(16), "w3", "bias_correction")
    assert mean_error(model, gm, held) < 0.2 * plain
    assert any("bias_correction: moved by 0." in note for note in provenance_of(gm).notes)


def test_quality_when_all_convolutions_are_corrected_in_order_then_higher(quantized):
    model, held = Normed(), images(16, seed=1)
    found = {}
    for names in ((), ("bias_correction",), ("gptq", "bias_correction")):
        gm = quantized(model, images(16), "w4", *names)
        with torch.no_grad():
            found[names] = pq.sqnr_db([model(x) for x in held], [gm(x) for x in held])
    assert found["bias_correction",] > found[()] + 1
    assert found["gptq", "bias_correction"] > found["bias_correction",]


def test_analytic_correction_when_batch_norms_tell_the_mean_then_as_good_without_data(quantized):
    model, held = Normed(), images(32, seed=1)
    plain, analytic, empirical = (
        mean_error(model, quantized(model, images(16), "w4", *names), held)
        for names in ((), ("analytic_bias_correction",), ("bias_correction",))
    )
    # it corrects the second convolution, and knows nothing of the first one's shift
    assert analytic < 0.7 * plain
    assert empirical < 0.7 * plain


def test_analytic_correction_when_no_batch_norm_was_there_then_refused(quantized):
    with pytest.raises(ConfigError, match="behind a layer with a folded batch norm"):
        quantized(Biased(), rows(2), "w3", "analytic_bias_correction")


def test_clipped_mean_when_a_normal_is_clamped_then_that_of_samples():
    mean, deviation = torch.tensor([0.0, -1.0, 5.0]), torch.tensor([1.0, 2.0, 3.0])
    normal = torch.randn(400_000, generator=torch.Generator().manual_seed(0))
    moments = OutputMoments(mean, deviation)
    for high in (6.0, math.inf):
        sampled = (mean[:, None] + deviation[:, None] * normal).clamp(0.0, high).mean(1)
        found = clipped_mean(moments, 0.0, high)
        torch.testing.assert_close(found.float(), sampled, rtol=0.01, atol=0.01)


def test_shift_when_means_are_uncertain_then_smaller_than_the_mean(quantized):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 8)).eval()
    data = [torch.randn(1, 64, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    sure = quantized(model, data, "w3", BiasCorrection(shrinks=False))
    careful = quantized(model, data, "w3", "bias_correction")
    tensors = [dict(gm.named_parameters()) | dict(gm.named_buffers()) for gm in (sure, careful)]
    moved = [(held["0.bias"] - model[0].bias).detach() for held in tensors]
    assert float(moved[1].norm()) < 0.8 * float(moved[0].norm())
    assert bool((moved[1].abs() <= moved[0].abs() + 1e-6).all())


class Pooled(nn.Module):
    """Saturating ranges in front of functions, and a global pool that keeps mean errors alone."""

    def __init__(self, function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.layers = nn.ModuleList(nn.Conv2d(8 if i else 3, 8, 3, padding=1) for i in range(4))
        for layer in self.layers:
            layer.weight.data.mul_(3)
        self.head = nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = self.function(layer(x))
        return self.head(x.mean((2, 3)))


class BiasedBelowZero(nn.Module):
    """A layer with biased rounding whose outputs a function cuts off at about their mean."""

    def __init__(self, function) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(64, 8), function
        with torch.no_grad():
            self.layer.weight.copy_(torch.full((8, 64), 1.4))
            self.layer.weight[:, 0] = 3.0  # w3 takes -3 .. 3: the step is 1
            self.layer.bias.copy_(torch.linspace(-20, -5, 8))

    def forward(self, x):
        return self.function(self.layer(x))


def cut_off(x):
    """Two functions, the second of which hides what the first makes of low values."""
    return torch.maximum(functional.leaky_relu(x, 0.2), torch.tensor(-0.4))


FUNCTIONS = (functional.relu, functional.gelu, functional.silu, functional.hardswish, cut_off)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_mean_error_when_a_function_reads_the_layer_then_gone_behind_it(
    quantized, monkeypatch, function
):
    model, corrects = BiasedBelowZero(function), BiasCorrection(shrinks=False)
    data = [x - 1.9 for x in rows(16)]
    plain, behind = (
        mean_error(model, quantized(model, data, "w3", *names), data) for names in ((), (corrects,))
    )
    monkeypatch.setattr(bias_correction, "functions_behind", lambda *_: None)
    in_front = mean_error(model, quantized(model, data, "w3", corrects), data)
    assert in_front > 0.2 * plain
    assert behind < 0.05 * plain


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 64), st.floats(0.0, 3.0), st.integers(0, 10_000))
def test_certain_part_when_used_then_shrunk_means_are_nearer_to_the_true_ones(count, width, seed):
    generator = torch.Generator().manual_seed(seed)
    true = width * torch.randn(512, dtype=torch.float64, generator=generator)
    noise = torch.randn(512, count, dtype=torch.float64, generator=generator)
    seen = true[:, None] + noise
    means, variances = seen.mean(1), seen.var(1) / count
    part = certain_part(means, variances)
    assert bool((part >= 0).all())
    assert bool((part <= 1).all())
    if count >= 8:
        errors = [float((found - true).square().sum()) for found in (part * means, means)]
        assert errors[0] <= 1.02 * errors[1]
    if width == 0 and count >= 8:
        assert float((part * means).square().sum()) < 0.5 * float(means.square().sum())


def test_certain_part_when_nothing_varies_then_all_or_nothing():
    means, none = torch.tensor([1.0, -2.0]), torch.zeros(2)
    assert certain_part(means, none).tolist() == [1.0, 1.0]
    assert certain_part(none, none).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("batches", "is_corrected"),
    [([1] * 7, False), ([1] * 8, True), ([8], True), ([2, 2, 2], False)],
)
def test_default_when_samples_are_few_then_biases_stay_and_a_note_says_so(batches, is_corrected):
    model, every = Pooled(functional.relu).eval(), torch.cat(images(16))
    data = [every[: batch + at][at:] for at, batch in enumerate(batches)]
    program = torch.export.export(model, (data[0],))
    prepared = pq.prepare_pt2e(program, pq.backends.get("xnnpack").quantizer("int8"))
    gm = pq.convert_pt2e(pq.calibrate(prepared, data, progress=False))
    notes = [note for note in provenance_of(gm).notes if "biases are as they are" in note]
    assert len(notes) == (not is_corrected)
    steps = [step for record in provenance_of(gm).tensors for step in record.steps]
    told = [n for n in provenance_of(gm).notes if "bias_correction: moved" in n]
    assert bool(told) == is_corrected, steps


def test_default_when_somebody_chose_the_observers_then_biases_stay():
    model, data = Pooled(functional.relu).eval(), images(16)
    program = torch.export.export(model, (data[0],))
    quantizer = pq.backends.get("onnx").quantizer("int8")
    quantizer.with_observers(activation=pq.MinMaxObserver)
    prepared = pq.prepare_pt2e(program, quantizer)
    gm = pq.convert_pt2e(pq.calibrate(prepared, data, progress=False))
    assert not [note for note in provenance_of(gm).notes if "bias_correction" in note]


def test_a_layer_when_it_has_no_bias_then_no_site(quantized):
    gm = quantized(Normed(bias=False), images(4), "w4", BiasCorrection(shrinks=False))
    notes = [note for note in provenance_of(gm).notes if "bias_correction" in note]
    assert [note.split(":")[0] for note in notes] == ["conv2d"]
