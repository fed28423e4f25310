"""Attention with masks of constants and of booleans: integers throughout, also in training."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.flow.qat.numerics import Numerics
from pt2e_quant.observers.training.fake_quantize import disable_observer


class Attention(nn.Module):
    """One head whose mask is causal, or given as booleans."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        is_causal = mask is None
        return self.out(
            functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        )


class Gated(nn.Module):
    """Values that booleans of run time blank, on either side of the product, before a relu."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        kept = torch.relu(self.first(x) * seen.to(x.dtype))
        return self.last(seen.to(x.dtype) * kept)


class Pooled(nn.Module):
    """The mean of the values that booleans of run time leave, as of the tokens of a sentence."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        kept = seen.to(x.dtype)
        total = (self.first(x) * kept).sum(1) / kept.sum(1).clamp(min=1.0)
        return self.last(total)


def inputs(kind):
    x = torch.randn(3, 6, 8)
    if kind == "causal":
        return (x,)
    if kind in ("gated", "pooled"):
        return x, torch.rand(3, 6, 1) > 0.4
    seen = torch.rand(3, 6, 6) > 0.4
    seen[0, 2] = False  # a row that sees nothing
    return x, seen


def model(kind):
    torch.manual_seed(0)
    return {"gated": Gated, "pooled": Pooled}.get(kind, Attention)()


@pytest.mark.parametrize("kind", ["causal", "booleans", "gated", "pooled"])
def test_mask_when_int_only_then_no_island_and_near_the_graph(kind):
    batches = [inputs(kind) for _ in range(4)]
    program = torch.export.export(model(kind).eval(), batches[0])
    prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, batches, progress=False))
    assert pq.audit(quantized).islands == ()
    for profile in ("default", "tflite", "onnxruntime_x86"):
        reference = pq.integer_reference(quantized, profile)
        floats = [n for n in reference.graph.nodes if str(n.target).startswith("aten.to")]
        assert floats == []
        for batch in batches:
            assert pq.sqnr_db(quantized(*batch), reference(*batch)) > 30
    if kind in ("booleans", "gated"):
        nothing = torch.zeros_like(batches[0][1])
        bias = quantized(batches[0][0], nothing)
        assert torch.equal(bias, bias[:1, :1].expand_as(bias))  # all rows are blanked
        assert torch.equal(reference(batches[0][0], nothing), bias)


@pytest.mark.parametrize("profile", ["default", "tflite"])
@pytest.mark.parametrize("kind", ["causal", "booleans", "gated", "pooled"])
def test_mask_when_trained_in_integers_then_the_reference_equals_the_forward(kind, profile):
    program = torch.export.export(model(kind).train(), inputs(kind))
    prepared = pq.prepare_qat_pt2e(
        program, pq.IntegerQuantizer(), numerics="integer", profile=profile
    ).train()
    numerics = pq.numerics_of(prepared)
    assert set(numerics.values()) == {Numerics.INTEGER}
    assert ("mul" if kind in ("gated", "pooled") else "softmax") in numerics
    assert not [n for n in pq.provenance_of(prepared).notes if "fake-quantize" in n]
    optimizer = torch.optim.SGD(prepared.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        prepared(*inputs(kind)).square().mean().backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in prepared.parameters())
    prepared.apply(disable_observer)
    for _ in range(4):
        batch = inputs(kind)
        trained = prepared.train()(*batch)
        converted = pq.convert_pt2e(copy.deepcopy(prepared).eval())
        assert torch.equal(pq.integer_reference(converted, profile)(*batch), trained)
