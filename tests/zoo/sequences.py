"""Sequence blocks: conformer, selective scan, recurrent cells, experts, convolutions, memories."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.block import Block

__all__ = ["BLOCKS"]

D, T = 16, 6


def rows(n):
    return (torch.randn(n, T, D),)


class Conformer(nn.Module):
    """Half a feed-forward, attention, a gated depthwise convolution, half a feed-forward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 32), nn.SiLU(), nn.Linear(32, D))
        self.last = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 32), nn.SiLU(), nn.Linear(32, D))
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.wide, self.narrow = nn.Conv1d(D, 2 * D, 1), nn.Conv1d(D, D, 1)
        self.depthwise = nn.Conv1d(D, D, 5, padding=2, groups=D)
        self.norm, self.batch_norm, self.out = nn.LayerNorm(D), nn.BatchNorm1d(D), nn.LayerNorm(D)

    def forward(self, x):
        x = x + 0.5 * self.first(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        y = F.glu(self.wide(self.norm(x).transpose(1, 2)), 1)
        y = self.narrow(F.silu(self.batch_norm(self.depthwise(y))))
        x = x + y.transpose(1, 2)
        return self.out(x + 0.5 * self.last(x))


class SelectiveScan(nn.Module):
    """A state space whose step, input and output depend on the token (Mamba), step by step."""

    def __init__(self):
        super().__init__()
        self.inner, self.states = 24, 4
        self.into, self.out = nn.Linear(D, 48), nn.Linear(24, D)
        self.conv = nn.Conv1d(24, 24, 4, groups=24, padding=3)
        self.parameters_of = nn.Linear(24, 2 + 8)
        self.step = nn.Linear(2, 24)
        self.log_a = nn.Parameter(torch.log(torch.arange(1.0, 5.0)).repeat(24, 1))
        self.skip = nn.Parameter(torch.ones(24))

    def forward(self, x):
        u, gate = self.into(x).chunk(2, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        step, b, c = self.parameters_of(u).split([2, 4, 4], -1)
        step = F.softplus(self.step(step))
        decay = torch.exp(-step[..., None] * self.log_a.exp())
        added = (step * u)[..., None] * b[:, :, None]
        state, found = torch.zeros_like(added[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + added[:, t]
            found.append((state * c[:, t, None]).sum(-1))
        return self.out((torch.stack(found, 1) + u * self.skip) * F.silu(gate))


class Retention(nn.Module):
    """A decay by distance in place of the softmax (RetNet)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.gate, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Linear(D, D)
        self.norm = nn.GroupNorm(2, D)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        place = torch.arange(x.shape[1])
        distance = (place[:, None] - place[None]).clamp(min=0)
        decay = torch.where(place[:, None] >= place[None], 0.9**distance, 0.0)
        y = ((q @ k.mT) * decay / D**0.5) @ v
        y = self.norm(y.transpose(1, 2)).transpose(1, 2)
        return self.out(F.silu(self.gate(x)) * y)


class TimeMix(nn.Module):
    """Tokens mixed with the one before, then an exponential average (RWKV)."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.rand(3, D))
        self.k, self.v, self.r, self.out = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.decay = nn.Parameter(torch.rand(D))

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        k, v, r = (
            layer(x * m + before * (1 - m))
            for layer, m in zip((self.k, self.v, self.r), self.mix, strict=True)
        )
        weight, num, den, found = torch.exp(-self.decay), 0.0, 1e-3, []
        for t in range(T):
            strength = k[:, t].clamp(max=8).exp()
            num, den = weight * num + strength * v[:, t], weight * den + strength
            found.append(num / den)
        return self.out(torch.sigmoid(r) * torch.stack(found, 1))


class Experts(nn.Module):
    """All experts run; the router's two best are summed."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 32), nn.SiLU(), nn.Linear(32, D)) for _ in range(4)
        )

    def forward(self, x):
        weights, chosen = torch.topk(self.router(x).softmax(-1), 2)
        share = torch.zeros(*x.shape[:2], 4).scatter(-1, chosen, weights)
        return sum(share[..., i, None] * e(x) for i, e in enumerate(self.experts))


class GatheredExperts(nn.Module):
    """Each token's expert weights are gathered, and multiplied in one batch."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.weights = nn.Parameter(torch.randn(4, D, D) * 0.2)

    def forward(self, x):
        flat = x.flatten(0, 1)
        share, chosen = self.router(flat).softmax(-1).max(-1)
        y = torch.bmm(flat[:, None], self.weights[chosen])[:, 0] * share[:, None]
        return y.view(x.shape)


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = getattr(nn, kind)(D, 12, batch_first=True, **options)
        self.head = nn.Linear(24 if options.get("bidirectional") else 12, 8)

    def forward(self, x):
        return self.head(self.layer(x)[0])


class Cells(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell, self.head, self.kind = getattr(nn, kind)(D, 12), nn.Linear(12, 8), kind

    def forward(self, x):
        state = torch.zeros(x.shape[0], 12)
        pair = (state, state)
        for t in range(3):
            pair = self.cell(x[:, t], pair if self.kind == "LSTMCell" else pair[0])
            pair = pair if isinstance(pair, tuple) else (pair, pair)
        return self.head(pair[0])


class MinimalGate(nn.Module):
    """A gated unit of one's own, whose projections are taken together."""

    def __init__(self):
        super().__init__()
        self.x, self.h, self.head = nn.Linear(D, 24), nn.Linear(12, 24), nn.Linear(12, 8)

    def forward(self, x):
        state = torch.zeros(x.shape[0], 12)
        for t in range(4):
            gate, new = (self.x(x[:, t]) + self.h(state)).chunk(2, -1)
            state = torch.lerp(state, torch.tanh(new), torch.sigmoid(gate))
        return self.head(state)


class TemporalConvolution(nn.Module):
    """Causal convolutions of growing dilation, with residual and skip sums (WaveNet)."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(D, 16, 1)
        self.gates = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**i) for i in range(3))
        self.mixes = nn.ModuleList(nn.Conv1d(16, 16, 1) for _ in range(3))
        self.head = nn.Conv1d(16, 8, 1)

    def forward(self, x):
        y, total = self.first(x), 0
        for i, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            a, b = gate(F.pad(y, (2**i, 0))).chunk(2, 1)
            z = mix(torch.tanh(a) * torch.sigmoid(b))
            y, total = y + z, total + z
        return self.head(F.relu(total))


class GatedConvolution(nn.Module):
    """A short and a long convolution by FFT in float (Hyena's shape, with a conv for the FFT)."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.short = nn.Conv1d(3 * D, 3 * D, 3, groups=3 * D, padding=2)
        self.long = nn.Conv1d(D, D, T, groups=D, padding=T - 1)

    def forward(self, x):
        y = self.short(self.into(x).transpose(1, 2))[..., : x.shape[1]]
        a, b, v = y.chunk(3, 1)
        return self.out((a * self.long(b * v)[..., : x.shape[1]]).transpose(1, 2))


class MixerBlock(nn.Module):
    """Linears over tokens, then over channels (MLP-Mixer)."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.LayerNorm(D), nn.LayerNorm(D)
        self.tokens = nn.Sequential(nn.Linear(T, 12), nn.GELU(), nn.Linear(12, T))
        self.channels = nn.Sequential(nn.Linear(D, 32), nn.GELU(), nn.Linear(32, D))

    def forward(self, x):
        x = x + self.tokens(self.a(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.b(x))


class TextCnn(nn.Module):
    """Embedded tokens, convolutions of three widths, the greatest of each."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, D, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(D, 8, k, padding=k // 2) for k in (1, 3, 5))
        self.head = nn.Linear(24, 4)

    def forward(self, ids):
        x = self.table(ids).transpose(1, 2)
        return self.head(torch.cat([F.relu(c(x)).amax(-1) for c in self.convs], 1))


class TiedDecoder(nn.Module):
    """The output layer is the embedding's table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(40, D)
        self.block = nn.TransformerEncoderLayer(D, 2, 32, batch_first=True, norm_first=True)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return F.linear(self.block(self.table(ids), mask), self.table.weight)


class MemoryRead(nn.Module):
    """Cosine attention over slots that the call also writes (a neural memory)."""

    def __init__(self):
        super().__init__()
        self.query, self.value, self.out = nn.Linear(D, 8), nn.Linear(D, 8), nn.Linear(8, 8)
        self.register_buffer("slots", torch.linspace(-1, 1, 40).view(5, 8))

    def forward(self, x):
        near = F.normalize(self.query(x), dim=-1) @ F.normalize(self.slots, dim=-1).t()
        share = (4 * near).softmax(-1)
        read = self.out(share @ self.slots)
        self.slots.mul_(0.9).add_(share.mean((0, 1))[:, None] * self.value(x).mean((0, 1)) * 0.1)
        return read


class ForecastHead(nn.Module):
    """A series split by a moving average; each part has its own linear (DLinear), normalised."""

    def __init__(self):
        super().__init__()
        self.trend, self.rest = nn.Linear(24, 8), nn.Linear(24, 8)

    def forward(self, x):
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True) + 1e-5
        y = (x - mean) / std
        smooth = F.avg_pool1d(F.pad(y, (2, 2), mode="replicate"), 5, 1)
        return (self.trend(smooth) + self.rest(y - smooth)) * std + mean


def tokens(n):
    return (torch.randint(1, 40, (n, 7)),)


BLOCKS = {
    "conformer": Block(make=Conformer, inputs=rows),
    "selective_scan": Block(make=SelectiveScan, inputs=rows),
    "retention": Block(make=Retention, inputs=rows),
    "time_mix": Block(make=TimeMix, inputs=rows),
    "experts": Block(make=Experts, inputs=rows),
    "gathered_experts": Block(make=GatheredExperts, inputs=rows),
    "lstm": Block(make=lambda: Recurrent("LSTM"), inputs=rows),
    "gru_both_ways": Block(make=lambda: Recurrent("GRU", bidirectional=True), inputs=rows),
    "rnn_two_layers": Block(make=lambda: Recurrent("RNN", num_layers=2), inputs=rows),
    "gru_cells": Block(make=lambda: Cells("GRUCell"), inputs=rows),
    "lstm_cells": Block(make=lambda: Cells("LSTMCell"), inputs=rows),
    "minimal_gate": Block(make=MinimalGate, inputs=rows),
    "temporal_convolution": Block(
        make=TemporalConvolution, inputs=lambda n: (torch.randn(n, D, 12),)
    ),
    "gated_convolution": Block(make=GatedConvolution, inputs=rows),
    "mixer": Block(make=MixerBlock, inputs=rows),
    "text_cnn": Block(make=TextCnn, inputs=tokens),
    "tied_decoder": Block(make=TiedDecoder, inputs=tokens),
    "memory_read": Block(make=MemoryRead, inputs=rows),
    "forecast_head": Block(make=ForecastHead, inputs=lambda n: (torch.randn(n, 3, 24).cumsum(-1),)),
}
