"""Integers that become real values, and what reads them."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.integer_ops.profiles import PROFILES
from tests.passes.reference.forms.between import Between, qp, steps_apart


@pytest.mark.parametrize("profile", ["default", "xnnpack", "tflite", "tosa"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_cast_when_quantized_then_the_integers_in_its_scale(dtype, profile):
    numbers = torch.tensor([0, 1, 2, 7, 100, 255, *([] if dtype is torch.uint8 else [-3, 10**8])])
    for output in (qp(1 / 255, -128), qp(0.9, 3), qp(0.01, -5, torch.int16)):
        model = Between(lambda x: x.to(torch.float32), [], output)
        assert steps_apart(model, numbers.to(dtype), profile=PROFILES[profile]) <= 1


class Pooled(nn.Module):
    """The mean of the rows that a mask of integers leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x, mask):
        seen = mask.unsqueeze(-1).float()
        pooled = (self.first(x) * seen).sum(1) / seen.sum(1).clamp(min=1e-9)
        return self.last(nn.functional.normalize(pooled, dim=1))


def test_integer_quantizer_when_rows_are_pooled_by_a_mask_then_none_is_float():
    draws = torch.Generator().manual_seed(0)
    calls = []
    for _ in range(8):
        lengths = torch.randint(1, 8, (3, 1), generator=draws)
        x = torch.randn(3, 7, 8, generator=draws)
        calls.append((x, (torch.arange(7) < lengths).long()))
    torch.manual_seed(0)
    model = Pooled().eval()
    program = torch.export.export(model, calls[0])
    prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, calls, progress=False))
    assert pq.audit(quantized).is_integer_only
    reference = pq.integer_reference(quantized)
    with torch.no_grad():
        expected, simulated, made = (
            torch.cat([run(*given) for given in calls]) for run in (model, quantized, reference)
        )
    assert pq.sqnr_db(expected, made) > pq.sqnr_db(expected, simulated) - 1.0
    assert pq.sqnr_db(expected, made) > 25
