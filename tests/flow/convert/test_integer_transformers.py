"""Transformers in integers throughout: softmax, norms and tables against their q/dq graph."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import export
from torch.nn import functional

import pt2e_quant as pq


class Attention(nn.Module):
    def __init__(self, width=32, heads=2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (
            layer(x).reshape(B, T, self.heads, D // self.heads).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = torch.matmul(q, k.transpose(-1, -2)) * (D // self.heads) ** -0.5
        y = torch.matmul(torch.softmax(scores, -1), v)
        return self.o(y.transpose(1, 2).reshape(B, T, D))


class Block(nn.Module):
    def __init__(self, norm, *, gated) -> None:
        super().__init__()
        self.first, self.second, self.attention = norm(), norm(), Attention()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.gate = nn.Linear(32, 64) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        y = self.second(x)
        if self.gate is None:
            return x + self.down(functional.gelu(self.up(y)))
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.blocks = nn.Sequential(*(Block(lambda: nn.LayerNorm(32), gated=False) for _ in "12"))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x)).mean(1))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        norm = lambda: nn.RMSNorm(32, eps=1e-5)  # noqa: E731
        self.blocks = nn.Sequential(*(Block(norm, gated=True) for _ in "12"))
        self.norm, self.head = norm(), nn.Linear(32, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(x)))


@pytest.mark.parametrize(("model", "shape"), [(Vit, (4, 3, 16, 16)), (Llama, (4, 12, 32))])
def test_transformer_when_in_integers_then_loses_at_most_one_db(model, shape):
    torch.manual_seed(0)
    net, batches = model().eval(), [torch.randn(shape) for _ in range(4)]
    prepared = pq.prepare_pt2e(export(net, (batches[0],)), pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, batches, progress=False))
    assert pq.audit(quantized).is_integer_only
    reference = pq.integer_reference(quantized)
    calls = {str(node.target) for node in reference.graph.nodes}
    for name in ("integer_softmax", "integer_norm", "integer_matmul", "integer_table"):
        assert f"pt2e_quant.{name}.default" in calls
    x = torch.randn(shape)
    with torch.no_grad():
        real, simulated, exact = net(x), quantized(x), reference(x)
    assert pq.sqnr_db(real, exact) >= pq.sqnr_db(real, simulated) - 1.0


@pytest.mark.parametrize("seed", range(6))
def test_vit_when_in_integers_then_loses_at_most_one_db_over_16_batches(seed):
    torch.manual_seed(seed)
    net, batches = Vit().eval(), [torch.randn(4, 3, 16, 16) for _ in range(20)]
    prepared = pq.prepare_pt2e(export(net, (batches[0],)), pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, batches[:4], progress=False))
    reference = pq.integer_reference(quantized)
    with torch.no_grad():
        real, simulated, exact = (
            torch.cat([module(x) for x in batches[4:]]) for module in (net, quantized, reference)
        )
    assert pq.sqnr_db(real, exact) >= pq.sqnr_db(real, simulated) - 1.0


def test_transformer_when_all_activations_have_16_bits_then_in_integers_alone():
    torch.manual_seed(0)
    net, batches = Vit().eval(), [torch.randn(2, 3, 16, 16) for _ in range(2)]
    quantizer = pq.IntegerQuantizer(activation_bits=16)
    prepared = pq.prepare_pt2e(export(net, (batches[0],)), quantizer, int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, batches, progress=False))
    reference = pq.integer_reference(quantized, accumulator_bits=64)
    assert "pt2e_quant.integer_softmax.default" in {str(n.target) for n in reference.graph.nodes}
    with torch.no_grad():
        real, simulated, exact = (module(batches[0]) for module in (net, quantized, reference))
    assert pq.sqnr_db(real, exact) >= pq.sqnr_db(real, simulated) - 0.2


class Masked(nn.Module):
    """Causal attention, then attention under a mask of booleans that comes with the call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 48), nn.Linear(16, 48)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = self.first(x).chunk(3, -1)
        x = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        q, k, v = self.second(x).chunk(3, -1)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def test_masked_attention_when_in_integers_then_softmax_is_of_what_is_seen():
    torch.manual_seed(0)
    net = Masked().eval()
    seen = torch.rand(2, 6, 6) > 0.4
    seen[1, 2] = False  # a row that sees nothing
    batches = [(torch.randn(2, 6, 16), seen) for _ in range(4)]
    prepared = pq.prepare_pt2e(export(net, batches[0]), pq.IntegerQuantizer())
    quantized = pq.convert_pt2e(pq.calibrate(prepared, batches, progress=False))
    left = {operator.operator for operator in pq.audit(quantized).islands}
    assert not left & {"aten.softmax", "aten.add", "aten.sub"}  # the gate of blank rows stays
    reference = pq.integer_reference(quantized)
    with torch.no_grad():
        real, simulated, exact = (module(*batches[0]) for module in (net, quantized, reference))
    assert pq.sqnr_db(real, exact) >= pq.sqnr_db(real, simulated) - 1.0


def test_softmax_when_what_is_added_may_be_no_mask_then_stays_float():
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qk = nn.Linear(8, 16)

        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            q, k = self.qk(x).chunk(2, -1)
            scores = torch.matmul(q, k.transpose(-1, -2))
            return torch.softmax(scores + bias, -1)

    torch.manual_seed(0)
    batch = torch.randn(2, 5, 8), torch.zeros(5)
    prepared = pq.prepare_pt2e(export(Biased().eval(), batch), pq.IntegerQuantizer())
    quantized = pq.convert_pt2e(pq.calibrate(prepared, [batch], progress=False))
    softmax = [i for i in pq.audit(quantized).islands if i.operator == "aten.softmax"]
    assert [i.reason for i in softmax] == ["it adds values of run time that may be no mask"]
