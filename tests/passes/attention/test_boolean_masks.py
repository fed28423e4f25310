"""Masks that attention adds, as the booleans that they are made of."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.graph.ops import SDPA, argument, is_call
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.attention.boolean_masks import boolean_masks
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from pt2e_quant.passes.mutation.functionalize_activations import functionalize_activations

CAUSAL = torch.ones(5, 5, dtype=torch.bool).triu(1)


class Padded(nn.Module):
    """An encoder layer's attention, whose keys are hidden by booleans and by a constant."""

    def __init__(self, mask=None):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("mask", mask)

    def forward(self, x, padding):
        arguments = {"key_padding_mask": padding, "attn_mask": self.mask}
        return self.attention(x, x, x, need_weights=False, **arguments)[0]


def inputs():
    torch.manual_seed(0)
    return torch.randn(3, 5, 8), torch.tensor([[0, 0, 0, 1, 1], [0] * 5, [0, 0, 1, 0, 1]]).bool()


def mask_of(gm):
    (attention,) = [n for n in gm.graph.nodes if is_call(n, SDPA)]
    return argument(attention, "attn_mask")


@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["padding", "causal"])
def test_mask_when_made_of_booleans_then_attention_reads_them(mask):
    model = Padded(mask).eval()
    gm = torch.export.export(model, inputs()).module()
    run_passes(gm, (strip_guards, functionalize_activations))
    with torch.no_grad():
        expected = gm(*inputs())
        assert boolean_masks(gm).changed
        torch.testing.assert_close(gm(*inputs()), expected)
    assert mask_of(gm).meta["val"].dtype is torch.bool
    assert not [n for n in gm.graph.nodes if "masked_fill" in n.name]
    assert not boolean_masks(gm).changed


def added(x, bias):
    return functional.scaled_dot_product_attention(x, x, x, attn_mask=bias)


def of_fives(x, seen):
    return added(x, torch.zeros_like(seen, dtype=x.dtype).masked_fill(seen, -5.0))


def of_ones(x, seen):
    return added(x, torch.ones_like(seen, dtype=x.dtype).masked_fill(seen, -torch.inf))


@pytest.mark.parametrize("operator", [added, of_fives, of_ones])
def test_mask_when_it_adds_other_numbers_then_it_stays(operator):
    class Model(nn.Module):
        def forward(self, *given):
            return operator(*given)

    x, seen = torch.randn(1, 5, 8), torch.rand(5, 5) > 0.5
    given = (x, seen.float() if operator is added else seen)
    gm = torch.export.export(Model(), given).module()
    (record,) = run_passes(gm, (strip_guards, boolean_masks))[1:]
    assert [n.text for n in record.notes] == ["its mask adds more than 0 and -inf"]
    assert not record.changed


@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["padding", "causal"])
def test_integer_quantizer_when_keys_are_padding_then_none_is_float(mask):
    model, (x, padding) = Padded(mask).eval(), inputs()
    program = torch.export.export(model, (x, padding))
    prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, [(x, padding)], progress=False))
    assert pq.audit(quantized).is_integer_only
    reference = pq.integer_reference(quantized)
    with torch.no_grad():
        assert pq.sqnr_db(model(x, padding), reference(x, padding)) > 30
