"""Convolutions with weights that are packed once are torch's, but for rounding."""

import pytest
import torch

import pt2e_quant as pq
from pt2e_quant.accelerate import bfloat16_products
from pt2e_quant.accelerate.packed_convolutions import PATCH, PackedConvolutions, channels_first
from pt2e_quant.accelerate.patch import VARIABLE


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "kernel"),
    [([1], [0], [1], (1, 1)), ([2, 1], [1, 2], [1, 1], (3, 3)), ([2], [3], [2], (3, 5))],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_run_when_a_weight_is_packed_then_the_result_is_the_convolutions(
    stride, padding, dilation, kernel, has_bias
):
    weight, bias = draw(8, 4, *kernel), draw(8) if has_bias else None
    packed = PackedConvolutions()
    with torch.no_grad():
        for size in (13, 16, 13):
            x = draw(2, 4, size, size)
            expected = torch.nn.functional.conv2d(x, weight, bias, stride, padding, dilation)
            found = packed.run("w", x, weight, bias, stride, padding, dilation, 1)
            assert channels_first(found).stride() == expected.stride()
            torch.testing.assert_close(found, expected)
    assert len(packed.packed) == 2


def test_run_when_it_cannot_be_packed_then_it_is_left_to_torch(monkeypatch):
    x, weight = draw(1, 4, 5, 5), draw(4, 4, 3, 3)
    rest = (None, [1], [0], [1])
    packed = PackedConvolutions()
    assert packed.run("w", x, weight, *rest, 1) is None  # gradients are recorded
    with torch.no_grad():
        assert packed.run("w", x, draw(4, 1, 3, 3), *rest, 4) is None
        assert packed.run("w", x[0], weight, *rest, 1) is None
        assert packed.run("w", x.double(), weight.double(), *rest, 1) is None
        monkeypatch.setenv(VARIABLE, PATCH.name)
        assert PackedConvolutions().run("w", x, weight, *rest, 1) is None


def test_sensitivity_when_the_patch_is_off_then_costs_are_the_same(monkeypatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3))
    batch = (draw(2, 3, 8, 8),)
    program = torch.export.export(model.eval(), batch)

    def costs():
        found = pq.sensitivity(program, "int8", [batch], backend="xnnpack", progress=False)
        return [row.cost for row in found]

    monkeypatch.setenv(VARIABLE, bfloat16_products.PATCH.name)
    patched = costs()
    monkeypatch.setenv(VARIABLE, f"{bfloat16_products.PATCH.name},{PATCH.name}")
    assert costs() == pytest.approx(patched, rel=1e-4)
