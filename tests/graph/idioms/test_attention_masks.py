import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pt2e_quant.graph.idioms.attention_masks import find_masks
from pt2e_quant.graph.show import show
from pt2e_quant.passes.attention.decompose_attention import decompose_attention
from pt2e_quant.passes.cleanup.strip_guards import strip_guards

_GENERATOR = torch.Generator().manual_seed(0)
Q = torch.randn(2, 4, 5, 8, generator=_GENERATOR)
SEEN = torch.ones(2, 5, dtype=torch.int64)
BLOCKED = torch.zeros(2, 1, 5, 5, dtype=torch.bool)


class Scores(nn.Module):
    """Attention with a mask applied in one of the ways that models apply it."""

    def __init__(self, apply) -> None:
        super().__init__()
        self.apply_mask = apply
        self.q = nn.Linear(8, 8)
        self.register_buffer("causal", torch.full((5, 5), -math.inf).triu(1))
        self.register_buffer("lower", torch.ones(5, 5, dtype=torch.bool).tril())
        self.bias = nn.Embedding(9, 1)

    def forward(self, x, mask):
        scores = (self.q(x) @ x.transpose(-1, -2)) / math.sqrt(8)
        return self.apply_mask(self, scores, mask).softmax(-1) @ x


def masks_of(model, *args):
    gm = torch.export.export(model.eval(), args).module()
    strip_guards(gm)
    found = find_masks(gm)
    return {n.name for n in found.masks}, {n.name for n in found.masked_scores}, gm


def test_masks_when_additive_like_bert_then_found_from_input_to_add():
    def apply(m, scores, seen):
        return (
            scores + (1.0 - seen[:, None, None, :].to(scores.dtype)) * torch.finfo(scores.dtype).min
        )

    masks, scores, _ = masks_of(Scores(apply), Q, SEEN)
    assert {"mask", "to", "rsub", "mul"} <= masks
    assert scores == {"add"}
    assert not {"div", "matmul", "linear", "x"} & masks


def test_masks_when_by_masked_fill_or_where_then_found():
    masks, scores, _ = masks_of(
        Scores(lambda m, s, blocked: s.masked_fill(blocked, -math.inf)), Q, BLOCKED
    )
    assert (masks, scores) == ({"mask"}, {"masked_fill"})
    masks, scores, _ = masks_of(
        Scores(lambda m, s, blocked: torch.where(blocked, torch.finfo(s.dtype).min, s)), Q, BLOCKED
    )
    assert (masks, scores) == ({"mask"}, {"where"})


def test_masks_when_causal_from_buffers_then_found():
    masks, scores, _ = masks_of(Scores(lambda m, s, _: s + m.causal), Q, SEEN)
    assert (masks, scores) == ({"causal"}, {"add"})
    masks, scores, _ = masks_of(
        Scores(lambda m, s, _: s.masked_fill(~m.lower, -1e4) + m.causal[:5, :5]), Q, SEEN
    )
    assert {"lower", "causal", "bitwise_not"} <= masks
    assert scores == {"masked_fill", "add"}


def test_masks_when_the_product_itself_adds_them_then_found():
    def apply(m, scores, seen):
        x = scores.flatten(0, 1)
        bias = (1.0 - seen.to(x.dtype)).repeat_interleave(4, 0)[:, None, :] * -1e9
        return torch.baddbmm(bias, x, x.transpose(1, 2)).view(scores.shape)

    masks, scores, _ = masks_of(Scores(apply), Q, SEEN)
    assert {"mul", "mask"} <= masks
    assert scores == {"baddbmm", "view"}


def test_masks_when_there_are_two_then_both_are_found():
    def apply(m, scores, seen):
        return (scores + m.causal) * 0.5 + (seen[:, None, None, :] - 1) * 1e9

    masks, scores, _ = masks_of(Scores(apply), Q, SEEN)
    assert {"causal", "mask"} <= masks
    assert scores == {"add", "mul", "add_1"}


def test_masks_when_one_is_data_elsewhere_then_only_its_mask_part_is_found():
    class Pooled(Scores):
        def forward(self, x, mask):
            attended = self.q(super().forward(x, mask))
            return (attended * mask[:, None, :, None].to(x.dtype)).sum(2)

    def apply(m, scores, seen):
        return scores + (1.0 - seen[:, None, None, :].to(scores.dtype)) * -1e9

    masks, _, _ = masks_of(Pooled(apply), Q, SEEN)
    assert "rsub" in masks
    assert "mask" not in masks, "pooling reads it as well"


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_when_attention_is_written_out_then_found_before_and_after(dtype):
    class Attention(nn.Module):
        def forward(self, q, mask):
            return F.scaled_dot_product_attention(q, q, q, mask)

    mask = torch.ones(2, 1, 5, 5).to(dtype)
    masks, scores, gm = masks_of(Attention(), Q, mask)
    assert (masks, scores) == ({"mask"}, set())
    decompose_attention(gm)
    found = find_masks(gm)
    by_name = {n.name for n in found.masks}
    assert {"mask", "any_1"} <= by_name, "the gate of fully masked rows is a mask too"
    assert {n.name for n in found.masked_scores} == {"add"}
    gate = next(n for n in gm.graph.nodes if n.name.startswith("any"))
    assert all(user in found.masks for user in gate.users), show(gm)


def test_masks_when_operands_are_biases_or_data_then_none():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(8, 3))
            self.b = nn.Parameter(torch.ones(3))

        def forward(self, x, y):
            return (x @ self.w + self.b).softmax(-1), (x + y).softmax(-1)

    masks, scores, _ = masks_of(Classifier(), Q, Q + 1)
    assert (masks, scores) == (set(), set())


def test_masks_when_a_bias_is_computed_from_a_product_then_none():
    def apply(m, scores, _):
        return scores + scores.transpose(-1, -2) @ scores

    masks, scores, _ = masks_of(Scores(apply), Q, SEEN)
    assert (masks, scores) == (set(), set())


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_masks_when_the_model_is_bert_then_one_per_softmax(implementation):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=32,
        attn_implementation=implementation,
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    given = {"input_ids": torch.randint(0, 50, (2, 7)), "attention_mask": torch.ones(2, 7).long()}
    gm = torch.export.export(model, (), given).module()
    strip_guards(gm)
    decompose_attention(gm)
    found = find_masks(gm)
    softmaxes = [n for n in gm.graph.nodes if "softmax" in str(n.target)]
    assert len(softmaxes) == 2
    for softmax in softmaxes:
        assert softmax.args[0] in found.masked_scores
        assert any(n in found.masks for n in softmax.args[0].all_input_nodes)
    assert len(found.masked_scores) == 2
    floats = [n for n in found.masks if n.meta["val"].is_floating_point()]
    assert floats
    assert not any("linear" in n.name or "layer_norm" in n.name for n in found.masks)


class Unscored(nn.Module):
    """A table beside scores that no product makes."""

    def __init__(self, table) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, x):
        return (x + self.table).softmax(-1)


@pytest.mark.parametrize("high", [-math.inf, -3.0])
def test_constant_beside_an_input_when_it_holds_infinities_then_it_is_a_mask(high):
    masks, scores, _ = masks_of(Unscored(torch.full((5, 8), high).triu(1)), Q)
    assert (masks, scores) == (({"table"}, {"add"}) if math.isinf(high) else (set(), set()))
