"""Learned clipping: ranges by what they do to the output."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.passes.algorithms.lwc import Lwc

WIDTH = 64


def samples(count: int = 8, seed: int = 0) -> list[torch.Tensor]:
    """Rows whose channel 7 is next to nothing."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(1, 32, WIDTH, generator=generator) for _ in range(count)]
    for x in found:
        x[..., 7] = 1e-4
    return found


def planted() -> nn.Module:
    """A linear whose weights of channel 7 are ten times as large as the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 48))
    with torch.no_grad():
        model[0].weight[:, 7] = 1.25 * (-1.0) ** torch.arange(48)
    return model


@pytest.mark.parametrize("recipe", ["w4", "w4_g32", "w3"])
def test_lwc_when_weights_of_a_dead_input_are_large_then_a_fraction_of_the_error(
    recipe, quantized, output_error
):
    model, held = planted(), samples(16, seed=1)
    plain = output_error(model, quantized(model, samples(), recipe, search="min_max"), held)
    settings = Lwc(steps=150, learning_rate=0.1)
    gm = quantized(model, samples(), recipe, settings, search="min_max")
    assert output_error(model, gm, held) < plain / 5
    assert any("lwc:" in step for r in provenance_of(gm).tensors for step in r.steps)


def test_lwc_when_weights_are_affine_then_both_ends_are_learned(quantized, output_error):
    model, held = planted(), samples(16, seed=1)
    with torch.no_grad():
        model[0].weight[:, 7].abs_()
    quantizer = pq.backends.get("onnx").quantizer("w4")
    program = torch.export.export(model.eval(), (held[0],))
    scheme = pq.scheme_named("w4_g32", symmetric=False)
    errors = []
    for algorithms in ((), (Lwc(steps=150, learning_rate=0.1),)):
        own = quantizer.set_global(scheme).with_search("min_max")
        prepared = pq.prepare_pt2e(program, own, algorithms=algorithms)
        gm = pq.convert_pt2e(pq.calibrate(prepared, samples(), progress=False))
        errors.append(output_error(model, gm, held))
    assert errors[1] < errors[0] / 3


def test_lwc_when_with_gptq_then_below_each_alone(quantized, output_error):
    torch.manual_seed(0)
    mixing = torch.randn(8, WIDTH)
    data = [torch.randn(1, 32, 8) @ mixing + 0.05 * torch.randn(1, 32, WIDTH) for _ in range(8)]
    model = nn.Sequential(nn.Linear(WIDTH, 48))
    errors = [
        output_error(model, quantized(model, data, "w3", *names, search="min_max"), data)
        for names in (("lwc",), ("lwc", "gptq"))
    ]
    assert errors[1] < errors[0]


def test_lwc_when_with_hqq_then_refused(quantized):
    with pytest.raises(ConfigError, match="both choose the scales of weights"):
        quantized(planted(), samples(), "w4", "hqq", "lwc")
