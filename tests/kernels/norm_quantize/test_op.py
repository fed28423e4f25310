"""Where a norm and the quantize behind it become one call, and where they do not."""

import pytest
import torch
from torch import nn

from pt2e_quant.core.qdq import ChoosePerToken, DequantizePerToken, QuantizePerToken
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.kernels.norm_quantize.op import KERNELS, fuse_norm_per_token
from pt2e_quant.kernels.quantize_per_token.fuse_choose import fuse_choose_quantize
from pt2e_quant.kernels.read_scheme import scheme_of
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from tests.kernels.lowering import calls_of, captured, fuse, qdq

K = 24


class Llama(nn.Module):
    """Hugging Face's LlamaRMSNorm."""

    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(K).to(dtype) + 0.5)

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Product(Llama):
    """The squares as a product, the factors the other way round."""

    def forward(self, x):
        return torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * x * self.weight


def norm_of(kind, dtype):
    torch.manual_seed(0)
    made = {
        "layer": lambda: nn.LayerNorm(K),
        "layer without bias": lambda: nn.LayerNorm(K, bias=False),
        "rms": lambda: nn.RMSNorm(K, eps=1e-6),
        "rms without weight": lambda: nn.RMSNorm(K, elementwise_affine=False),
        "llama": lambda: Llama(dtype),
        "product": lambda: Product(dtype),
    }[kind]()
    return made.to(dtype)


CASES = [
    (kind, dtype)
    for kind in ("layer", "layer without bias", "rms", "rms without weight", "llama", "product")
    for dtype in (torch.float32, torch.bfloat16)
    # Its squares and sums are rounded to bfloat16 in the graph, and are not in the kernel.
    if (kind, dtype) != ("product", torch.bfloat16)
]


class Static(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        made = self.norm(x)
        return qdq(made, 0.02, 3) + 1.0, qdq(made, 0.02, 3) * 2.0


class Dynamic(Static):
    def forward(self, x):
        made = self.norm(x)
        results = []
        for _ in range(2):
            scale, zero_point = ChoosePerToken(made, torch.int8)
            q = QuantizePerToken(made, scale, zero_point, -128, 127, torch.int8)
            dq = DequantizePerToken(q, scale, zero_point, -128, 127, torch.int8, x.dtype)
            results.append(dq * 1.0)
        return tuple(results)


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_norm_when_a_static_quantize_reads_it_then_is_one_call_within_a_step(kind, dtype):
    x = torch.randn(2, 5, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    gm = captured(Static(norm_of(kind, dtype)), x)
    wanted = gm(x)
    fuse(gm, KERNELS, strip_guards)
    assert calls_of(gm) == ["norm_quantize"]
    assert "pow" not in str(gm.graph)
    made = gm(x)
    assert (made[0] - wanted[0]).abs().max() <= 0.02 * 1.001
    assert ((made[0] - wanted[0]).abs() > 0).float().mean() < 0.02


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_norm_when_quantized_per_token_then_is_one_call_for_all_readers(kind, dtype):
    x = torch.randn(2, 5, K, generator=torch.Generator().manual_seed(1)).to(dtype)
    gm = captured(Dynamic(norm_of(kind, dtype)), x)
    wanted = gm(x)
    run_passes(gm, (strip_guards, fuse_choose_quantize, fuse_norm_per_token))
    assert calls_of(gm) == ["norm_quantize_per_token"]
    (first, second) = (n for n in gm.graph.nodes if n.target is DequantizePerToken)
    assert scheme_of(gm, first) == scheme_of(gm, second) is not None
    for ours, theirs in zip(gm(x), wanted, strict=True):
        step = theirs.float().abs().max() / 64
        difference = (ours.float() - theirs.float()).abs()
        assert difference.max() <= step
        assert (difference > step / 4).float().mean() < 0.05
    assert not fuse_norm_per_token(gm).changed


class AlsoFloat(Static):
    def forward(self, x):
        made = self.norm(x)
        scale, zero_point = ChoosePerToken(made, torch.int8)
        q = QuantizePerToken(made, scale, zero_point, -128, 127, torch.int8)
        return DequantizePerToken(q, scale, zero_point, -128, 127, torch.int8, x.dtype), made


def test_norm_when_read_in_float_too_then_stays():
    gm = captured(AlsoFloat(nn.LayerNorm(K)), torch.ones(2, K))
    run_passes(gm, (strip_guards, fuse_choose_quantize))
    result = fuse_norm_per_token(gm)
    assert not result.changed
    assert [n.text for n in result.notes] == [
        "layer_norm needs nothing but one quantize per token that reads it"
    ]
    fuse(gm, KERNELS)
    assert calls_of(gm) == ["quantize_per_token"]


def test_norm_when_two_axes_are_normalized_then_stays():
    gm = captured(Static(nn.LayerNorm((5, K))), torch.ones(2, 5, K))
    fuse(gm, KERNELS)
    assert calls_of(gm) == []
