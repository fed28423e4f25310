import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pt2e_quant.passes.attention.decompose_attention import narrow_attention

Q, K, V = (torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n)) for n in (5, 6, 6))


class Attention(nn.Module):
    def forward(self, q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.5) + 1


def test_attention_when_float32_then_computed_in_bfloat16_between_casts(program):
    p = program(Attention(), (Q, K, V)).apply(narrow_attention, keeps_outputs=False)
    p.shows(
        """
        q: f32[1, 2, 5, 8] = input
        k: f32[1, 2, 6, 8] = input
        v: f32[1, 2, 6, 8] = input
        to: bf16[1, 2, 5, 8] = to(q, bf16)
        to_1: bf16[1, 2, 6, 8] = to(k, bf16)
        to_2: bf16[1, 2, 6, 8] = to(v, bf16)
        scaled_dot_product_attention: bf16[1, 2, 5, 8] = \
scaled_dot_product_attention(to, to_1, to_2, scale=0.5)
        to_3: f32[1, 2, 5, 8] = to(scaled_dot_product_attention, f32)
        add: f32[1, 2, 5, 8] = add(to_3, 1)
        return (add)
        """
    )
    # Sums of values weighted by 1 in all: an operand's 2^-9 and the result's 2^-8 of |v| <= 4.
    p.matches(rtol=0, atol=4 * (2**-8 + 3 * 2**-9)).is_idempotent(narrow_attention)


@pytest.mark.parametrize("kind", ["bool", "lowest", "rows"])
def test_mask_when_attention_is_narrowed_then_stays_as_it_is(program, kind):
    mask = torch.zeros(1, 1, 5, 6)
    mask[..., 4:] = torch.finfo(torch.float32).min
    if kind == "rows":
        mask[0, 0, 2] = torch.finfo(torch.float32).min
    if kind == "bool":
        mask = mask == 0
    p = program(Attention(), (Q, K, V, mask)).apply(narrow_attention, keeps_outputs=False)
    p.matches(rtol=0, atol=4 * (2**-8 + 3 * 2**-9))
    assert p.targets()["aten.to.dtype"] == 4


def test_attention_when_not_float32_then_left(program):
    p = program(Attention(), (Q.double(), K.double(), V.double())).apply(
        narrow_attention, keeps_outputs=False
    )
    assert "aten.to.dtype" not in p.targets()
    assert p.skips == ["attention that is not float32 stays as it is"]


def test_attention_when_sizes_are_dynamic_then_other_sizes_match(program):
    n = torch.export.Dim("n", min=2, max=9)
    p = program(Attention(), (Q, K, V), ({2: n}, None, None)).apply(
        narrow_attention, keeps_outputs=False
    )
    p.matches((torch.randn(1, 2, 3, 8), K, V), rtol=0, atol=4 * (2**-8 + 3 * 2**-9))
