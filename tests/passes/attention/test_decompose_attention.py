import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pt2e_quant.passes.attention.decompose_attention import decompose_attention, masked_score

_GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = torch.randn(3, 2, 4, 5, 8, generator=_GENERATOR)
SEEN = torch.rand(2, 1, 5, 5, generator=_GENERATOR) > 0.5
SEEN[0, 0, 1] = False  # one row masked as a whole
LOW = torch.zeros(2, 1, 5, 5).masked_fill(~SEEN, -math.inf)


class Attention(nn.Module):
    def __init__(self, layers: int = 1, **options) -> None:
        super().__init__()
        self.layers = layers
        self.options = options

    def forward(self, q, k, v, mask=None):
        for _ in range(self.layers):
            q = F.scaled_dot_product_attention(q, k, v, mask, **self.options)
        return q


def test_attention_when_it_has_no_mask_then_no_add_is_written(program):
    p = program(Attention(), (Q, K, V))
    p.shows(
        """
        q: f32[2, 4, 5, 8] = input
        k: f32[2, 4, 5, 8] = input
        v: f32[2, 4, 5, 8] = input
        scaled_dot_product_attention: f32[2, 4, 5, 8] = scaled_dot_product_attention(q, k, v)
        return (scaled_dot_product_attention)
        """
    )
    p.apply(decompose_attention)
    p.shows(
        """
        q: f32[2, 4, 5, 8] = input
        k: f32[2, 4, 5, 8] = input
        v: f32[2, 4, 5, 8] = input
        transpose: f32[2, 4, 8, 5] = transpose(k, -2, -1)
        matmul: f32[2, 4, 5, 5] = matmul(q, transpose)
        mul: f32[2, 4, 5, 5] = mul(matmul, 0.353553)
        softmax: f32[2, 4, 5, 5] = softmax(mul, -1)
        matmul_1: f32[2, 4, 5, 8] = matmul(softmax, v)
        return (matmul_1)
        """
    )
    p.matches().is_idempotent(decompose_attention)


def test_boolean_mask_when_many_layers_read_it_then_made_additive_once(program):
    p = program(Attention(layers=3), (Q, K, V, SEEN)).apply(decompose_attention)
    assert p.text.startswith(
        "q: f32[2, 4, 5, 8] = input\n"
        "k: f32[2, 4, 5, 8] = input\n"
        "v: f32[2, 4, 5, 8] = input\n"
        "mask: bool[2, 1, 5, 5] = input\n"
        "to: f32[2, 1, 5, 5] = to(mask, f32)\n"
        "sub: f32[2, 1, 5, 5] = sub(to, 1.0)\n"
        "mul: f32[2, 1, 5, 5] = mul(sub, 2.55212e+38)\n"
        "any: bool[2, 1, 5, 1] = any(mask, -1, keepdim=True)\n"
        "to_1: f32[2, 1, 5, 1] = to(any, f32)\n"
    )
    assert p.targets()["aten.any.dim"] == 1
    p.matches()
    assert torch.equal(p.gm(Q, K, V, SEEN)[0, :, 1], torch.zeros(4, 8)), "masked as a whole"


def test_float_mask_when_a_row_is_all_infinite_then_the_output_row_is_zero(program):
    p = program(Attention(layers=2), (Q, K, V, LOW)).apply(decompose_attention)
    assert p.targets()["aten.clamp.default"] == 1
    assert p.targets()["aten.ne.Scalar"] == 1
    p.matches()
    assert torch.equal(p.gm(Q, K, V, LOW)[0, :, 1], torch.zeros(4, 8))


def test_mask_when_known_to_be_finite_then_added_as_it_is(program):
    class Finite(nn.Module):
        def forward(self, q, k, v, seen):
            mask = (1.0 - seen[:, None, None, :].to(q.dtype)) * torch.finfo(q.dtype).min
            return F.scaled_dot_product_attention(q, k, v, mask)

    seen = torch.ones(2, 5, dtype=torch.int64)
    seen[1, 3:] = 0
    p = program(Finite(), (Q, K, V, seen)).apply(decompose_attention)
    assert "aten.clamp.default" not in p.targets()
    assert "aten.any.dim" not in p.targets()
    p.matches((Q, K, V, torch.zeros(2, 5, dtype=torch.int64)))


def test_constant_mask_when_no_row_is_empty_then_no_gate_is_written(program):
    class Causal(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.ones(5, 5, dtype=torch.bool).tril())

        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, self.seen)

    p = program(Causal(), (Q, K, V)).apply(decompose_attention)
    assert "aten.any.dim" not in p.targets()
    p.matches()


def test_constant_mask_when_decomposed_then_its_additive_form_is_a_constant(program):
    class Masked(nn.Module):
        def __init__(self, mask):
            super().__init__()
            self.register_buffer("mask", mask)

        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, self.mask, scale=1.0)

    for mask in (SEEN, LOW):
        p = program(Masked(mask), (Q, K, V)).apply(decompose_attention)
        p.shows(
            """
            q: f32[2, 4, 5, 8] = input
            k: f32[2, 4, 5, 8] = input
            v: f32[2, 4, 5, 8] = input
            transpose: f32[2, 4, 8, 5] = transpose(k, -2, -1)
            matmul: f32[2, 4, 5, 5] = matmul(q, transpose)
            add: f32[2, 4, 5, 5] = add(matmul, mask_additive)
            softmax: f32[2, 4, 5, 5] = softmax(add, -1)
            matmul_1: f32[2, 4, 5, 8] = matmul(softmax, v)
            mul: f32[2, 4, 5, 8] = mul(matmul_1, mask_additive_rows)
            return (mul)
            """
        )
        p.matches()
    p = program(Masked(torch.ones_like(SEEN)), (Q, K, V)).apply(decompose_attention)
    assert "add" not in p.text, "a mask that masks nothing is left out"
    p.matches()


@pytest.mark.parametrize(
    ("options", "args"),
    [
        ({"is_causal": True}, (Q, K, V)),
        ({"is_causal": True}, (Q, K[:, :, :3], V[:, :, :3])),
        ({"is_causal": True}, (Q[:, :, :2], K, V)),
        ({"scale": 0.3}, (Q, K, V, LOW)),
        ({"enable_gqa": True}, (Q, K[:, :2], V[:, :2], SEEN)),
        ({"enable_gqa": True}, (Q, K, V)),
        ({}, (Q[0], K[0], V[0])),
        ({}, (Q, K, V[..., :3], SEEN[:, :, :1])),
    ],
)
def test_attention_when_options_are_given_then_outputs_match_the_operator(program, options, args):
    p = program(Attention(layers=1, **options), args).apply(decompose_attention)
    assert "aten.scaled_dot_product_attention.default" not in p.targets()
    p.matches().is_idempotent(decompose_attention)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_when_shapes_are_dynamic_then_they_stay_dynamic(program, causal):
    batch = torch.export.Dim("batch", min=2, max=9)
    length = torch.export.Dim("length", min=2, max=9)
    shapes = ({0: batch, 2: length},) * 3
    args = (Q, K, V) if causal else (Q, K, V, SEEN)
    dims = shapes if causal else (*shapes, {0: batch, 2: length, 3: length})
    p = program(Attention(layers=2, is_causal=causal), args, dims).apply(decompose_attention)
    assert "matmul: f32[s0, 4, s1, s1]" in p.text
    other = torch.randn(3, 3, 4, 7, 8)
    p.matches(tuple(other) if causal else (*other, torch.rand(3, 1, 7, 7) > 0.3))


def test_view_when_it_relied_on_the_layout_then_becomes_a_reshape(program):
    class Heads(nn.Module):
        def forward(self, q, k, v):
            y = F.scaled_dot_product_attention(q, k, v)
            return y.transpose(1, 2).contiguous().view(2, 5, 32)

    p = program(Heads(), (Q, K, V)).apply(decompose_attention)
    assert "aten.view.default" not in p.targets()
    p.matches()


def test_masked_row_when_half_precision_then_the_output_row_is_zero(program):
    q, k, v = (x.half() * 20 for x in (Q, K, V))
    p = program(Attention(), (q, k, v, SEEN)).apply(decompose_attention)
    assert torch.equal(p.gm(q, k, v, SEEN)[0, :, 1], torch.zeros(4, 8).half())
    # float16 keeps 11 bits; scores of a few thousand are rounded before softmax
    p.matches(rtol=0.05, atol=0.5)


def test_attention_when_dropout_is_active_then_declined(program):
    p = program(Attention(dropout_p=0.1), (Q, K, V))
    result = decompose_attention(p.gm)
    assert not result.changed
    assert [n.text for n in result.notes] == ["dropout is active: export the model after eval()"]


def test_scale_when_the_width_of_a_head_is_dynamic_then_it_is_computed_in_the_call(program):
    width = torch.export.Dim("width", min=2, max=64)
    p = program(Attention(), (Q, K, V), ({3: width},) * 3).apply(decompose_attention)
    assert "aten.scaled_dot_product_attention.default" not in p.targets()
    p.matches()
    p.matches(tuple(torch.randn(3, 2, 4, 5, 33, generator=_GENERATOR)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_masked_score_when_a_score_is_added_then_stays_low_and_finite(dtype):
    low = torch.tensor(masked_score(dtype), dtype=dtype)
    for score in (-1000.0, 1000.0):
        value = low + torch.tensor(score, dtype=dtype)
        assert torch.isfinite(value)
        assert value <= torch.finfo(dtype).min / 2
