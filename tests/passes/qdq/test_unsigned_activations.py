"""unsigned_activations: int8 activations as uint8, with the same real values."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.graph.show import show
from pt2e_quant.passes.qdq.shift_activations import unsigned_activations


class QdqTwice(nn.Module):
    def __init__(self, zero_point, low, dtype=torch.int8, reads_integers=False):
        super().__init__()
        self.qparams = (0.05, zero_point, low, 127, dtype)
        self.reads_integers = reads_integers

    def forward(self, x):
        q = QuantizePerTensor(x, *self.qparams)
        y = torch.relu(DequantizePerTensor(q, *self.qparams))
        return (y, q) if self.reads_integers else (y, DequantizePerTensor(q, *self.qparams))


def exported(module):
    return torch.export.export(module, (torch.linspace(-9, 9, 64),)).module(check_guards=False)


def test_unsigned_when_int8_then_becomes_uint8_once():
    gm = exported(QdqTwice(-28, -128))
    assert "quantize_per_tensor(x, 0.05, -28, -128, 127, i8)" in show(gm)
    assert unsigned_activations(gm).changed
    assert "quantize_per_tensor(x, 0.05, 100, 0, 255, u8)" in show(gm)
    assert "i8" not in show(gm)
    assert not unsigned_activations(gm).changed


@settings(max_examples=20)
@given(st.integers(-128, 127), st.sampled_from([-128, -127, 0]))
def test_unsigned_when_applied_then_real_values_are_the_same_bits(zero_point, low):
    gm = exported(QdqTwice(zero_point, low))
    x = torch.linspace(-20, 20, 997)[:64]
    before = gm(x)
    unsigned_activations(gm)
    for old, new in zip(before, gm(x), strict=True):
        assert torch.equal(old, new)


def test_unsigned_when_something_reads_the_integers_then_declined():
    gm = exported(QdqTwice(-28, -128, reads_integers=True))
    before = show(gm)
    result = unsigned_activations(gm)
    assert not result.changed
    assert [note.text for note in result.notes if note.skipped] == ["something reads its integers"]
    assert show(gm) == before


def test_unsigned_when_already_uint8_then_left_alone():
    gm = exported(QdqTwice(0, 0, torch.uint8))
    assert not unsigned_activations(gm).changed
