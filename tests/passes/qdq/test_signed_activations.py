"""signed_activations: uint8 activations as int8, with the same real values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.graph.show import show
from pt2e_quant.passes.qdq.shift_activations import signed_activations


class QdqTwice(nn.Module):
    def __init__(self, zero_point, high, dtype=torch.uint8, reads_integers=False):
        super().__init__()
        self.qparams = (0.05, zero_point, 0, high, dtype)
        self.reads_integers = reads_integers

    def forward(self, x):
        q = QuantizePerTensor(x, *self.qparams)
        y = torch.relu(DequantizePerTensor(q, *self.qparams))
        return (y, q) if self.reads_integers else (y, DequantizePerTensor(q, *self.qparams))


def exported(module):
    return torch.export.export(module, (torch.linspace(-9, 9, 64),)).module(check_guards=False)


def test_signed_when_uint8_then_becomes_int8_once():
    gm = exported(QdqTwice(100, 255))
    assert "quantize_per_tensor(x, 0.05, 100, 0, 255, u8)" in show(gm)
    assert signed_activations(gm).changed
    assert "quantize_per_tensor(x, 0.05, -28, -128, 127, i8)" in show(gm)
    assert "u8" not in show(gm)
    assert not signed_activations(gm).changed


@settings(max_examples=30)
@given(st.integers(0, 255), st.sampled_from([127, 255]))
def test_signed_when_applied_then_real_values_are_the_same_bits(zero_point, high):
    gm = exported(QdqTwice(zero_point, high))
    x = torch.linspace(-20, 20, 997)[:64]
    before = gm(x)
    signed_activations(gm)
    for old, new in zip(before, gm(x), strict=True):
        assert torch.equal(old, new)


def test_signed_when_something_reads_the_integers_then_declined():
    gm = exported(QdqTwice(100, 255, reads_integers=True))
    before = show(gm)
    result = signed_activations(gm)
    assert not result.changed
    assert [note.text for note in result.notes if note.skipped] == ["something reads its integers"]
    assert show(gm) == before


@pytest.mark.parametrize("dtype", [torch.int8])
def test_signed_when_already_signed_then_left_alone(dtype):
    gm = exported(QdqTwice(0, 127, dtype))
    assert not signed_activations(gm).changed
