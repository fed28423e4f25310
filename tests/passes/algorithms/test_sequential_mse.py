"""Sequential MSE: rows with an outlier weight that inputs hardly use, and what stays."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.provenance import provenance_of

pytestmark = pytest.mark.usefixtures("unmeasured")


class Outlier(nn.Module):
    """Each row has two weights six times as large as the rest, where inputs are a fiftieth."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(64, 24)
        with torch.no_grad():
            greatest = self.layer.weight.abs().amax(1)
            self.layer.weight[:, 6] = -6 * greatest
            self.layer.weight[:, 5] = 6 * greatest

    def forward(self, x):
        return self.layer(x)


def rows(count: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(1, 16, 64, generator=generator) for _ in range(count)]
    for x in made:
        x[..., 5:7] *= 0.02
    return made


@pytest.mark.parametrize(("recipe", "gain"), [("w4", 2.0), ("w4_g32", 2.0)])
def test_error_when_a_weight_that_hardly_counts_sets_the_scale_then_less(
    quantized, output_error, recipe, gain
):
    model, held = Outlier(), rows(16, seed=1)
    plain = output_error(model, quantized(model, rows(16), recipe), held)
    gm = quantized(model, rows(16), recipe, "sequential_mse")
    assert output_error(model, gm, held) < plain / gain
    record = next(r for r in provenance_of(gm).tensors if r.steps)
    assert "sequential_mse" in record.steps[0]


def test_scales_when_found_by_sequential_mse_then_gptq_rounds_on_them(quantized, output_error):
    model, held = Outlier(), rows(16, seed=1)
    both = quantized(model, rows(16), "w4", "sequential_mse", "gptq")
    alone = quantized(model, rows(16), "w4", "gptq")
    assert output_error(model, both, held) < output_error(model, alone, held)


def test_algorithms_when_two_choose_scales_then_refused(quantized):
    with pytest.raises(pq.errors.ConfigError, match="both choose the scales"):
        quantized(Outlier(), rows(2), "w4", "sequential_mse", "hqq")
