"""Attention of many kinds: cross, grouped, latent, linear, local, rotary, with a cache."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.block import Block

__all__ = ["BLOCKS"]

D, H, T = 32, 4, 8


def rows(n):
    return (torch.randn(n, T, D),)


def split(x, heads=H):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge(x):
    return x.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Softmax attention written out, with a causal mask made in the call."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(D // H)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.out(merge(scores.masked_fill(causal, float("-inf")).softmax(-1) @ v))


class CrossAttention(nn.Module):
    """Queries of one sequence, keys and values of another, with a padding mask."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(D, D), nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x, memory, keep):
        k, v = map(split, self.kv(memory).chunk(2, -1))
        mask = keep[:, None, None, :]
        return self.out(merge(F.scaled_dot_product_attention(split(self.q(x)), k, v, mask)))


class GroupedRotary(nn.Module):
    """Rotary positions, fewer heads of keys than of queries."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D // 2), nn.Linear(D, D // 2)
        self.out = nn.Linear(D, D)
        angles = torch.outer(torch.arange(16.0), 1e4 ** (-torch.arange(0, 8, 2) / 8.0))
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

    def rotate(self, x):
        a, b = x.chunk(2, -1)
        n = x.shape[-2]
        return x * self.cos[:n] + torch.cat([-b, a], -1) * self.sin[:n]

    def forward(self, x):
        q, k = self.rotate(split(self.q(x))), self.rotate(split(self.k(x), 2))
        k, v = (y.repeat_interleave(2, 1) for y in (k, split(self.v(x), 2)))
        return self.out(merge(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class CachedRotary(nn.Module):
    """One token a call: grouped heads, and a cache in buffers that the call writes."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer("keys", torch.zeros(1, 2, 16, D // H))
        self.register_buffer("values", torch.zeros(1, 2, 16, D // H))

    def forward(self, x, position):
        k, v = (split(y, 2) for y in self.kv(x).chunk(2, -1))
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        keys, values = (y.repeat_interleave(2, 1) for y in (self.keys, self.values))
        seen = (torch.arange(16) <= position)[None, None, None]
        return self.out(merge(F.scaled_dot_product_attention(split(self.q(x)), keys, values, seen)))


class LatentAttention(nn.Module):
    """Keys and values from a narrow latent, with a part for positions (DeepSeek-V2)."""

    def __init__(self):
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(D, 8), nn.RMSNorm(8), nn.Linear(8, 2 * D)
        self.q, self.q_rope, self.k_rope = nn.Linear(D, D), nn.Linear(D, H * 4), nn.Linear(D, 4)
        self.out = nn.Linear(D, D)

    def forward(self, x):
        k, v = map(split, self.up(self.norm(self.down(x))).chunk(2, -1))
        q = torch.cat([split(self.q(x)), split(self.q_rope(x))], -1)
        k = torch.cat([k, self.k_rope(x)[:, None].expand(-1, H, -1, -1)], -1)
        return self.out(merge((q @ k.mT / math.sqrt(12)).softmax(-1) @ v))


class LinearAttention(nn.Module):
    """elu + 1 as feature map; keys and values are summed first."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        scale = 1 / (q * k.sum(-2, keepdim=True)).sum(-1, keepdim=True).clamp(min=1e-4)
        return self.out(merge(q @ (k.mT @ v) * scale))


class WindowAttention(nn.Module):
    """Shifted windows of an image with a table of relative positions (Swin)."""

    def __init__(self, shift):
        super().__init__()
        self.shift = shift
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.table = nn.Parameter(torch.randn(49, H) * 0.1)
        at = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        relative = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + 3
        self.register_buffer("index", relative[..., 0] * 7 + relative[..., 1])

    def forward(self, x):
        b, h, w, c = x.shape
        y = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2)) if self.shift else x
        y = y.view(b, h // 4, 4, w // 4, 4, c).transpose(2, 3).reshape(-1, 16, c)
        q, k, v = map(split, self.qkv(y).chunk(3, -1))
        bias = self.table[self.index.view(-1)].view(16, 16, H).permute(2, 0, 1)
        y = self.out(merge((q @ k.mT / 8**0.5 + bias).softmax(-1) @ v))
        y = y.view(b, h // 4, w // 4, 4, 4, c).transpose(2, 3).reshape(b, h, w, c)
        return x + (torch.roll(y, (self.shift, self.shift), (1, 2)) if self.shift else y)


class AlibiAttention(nn.Module):
    """A slope a head times the distance, added to the scores."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, H + 1)[:, None, None])

    def forward(self, x):
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        place = torch.arange(x.shape[1])
        bias = -(place[:, None] - place[None]).abs() * self.slopes
        return self.out(merge((q @ k.mT / 8**0.5 + bias).softmax(-1) @ v))


class DisentangledAttention(nn.Module):
    """Content-to-position scores gathered by relative distance (DeBERTa)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.position = nn.Linear(D, 3 * D), nn.Embedding(2 * T, D)
        self.to_key, self.out = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        relative = split(self.to_key(self.position.weight)[None])
        distance = torch.arange(T)[:, None] - torch.arange(T)[None] + T
        index = distance.expand(x.shape[0], H, T, T)
        scores = q @ k.mT + torch.gather(q @ relative.mT, -1, index)
        return self.out(merge((scores / math.sqrt(24)).softmax(-1) @ v))


class LocalAttention(nn.Module):
    """Blocks of the sequence see themselves and the block before."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = (y.view(x.shape[0], T // 4, 4, D) for y in self.qkv(x).chunk(3, -1))
        k, v = (torch.cat([F.pad(y, (0, 0, 0, 0, 1, 0))[:, :-1], y], 2) for y in (k, v))
        y = (q @ k.mT / math.sqrt(D)).softmax(-1) @ v
        return self.out(y.reshape(x.shape))


class ChannelAttention(nn.Module):
    """Attention over channels, with normalised keys and a learned temperature (XCiT, Restormer)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.mix = nn.Conv2d(16, 48, 1), nn.Conv2d(48, 48, 3, padding=1, groups=48)
        self.heat, self.out = nn.Parameter(torch.ones(4, 1, 1)), nn.Conv2d(16, 16, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = (y.reshape(b, 4, 4, h * w) for y in self.mix(self.qkv(x)).chunk(3, 1))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return self.out(((q @ k.mT * self.heat).softmax(-1) @ v).reshape(b, c, h, w)) + x


class PooledAttention(nn.Module):
    """Keys and values at half the resolution (PVT, MViT)."""

    def __init__(self):
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)
        self.shrink, self.norm = nn.Conv2d(16, 16, 2, 2), nn.LayerNorm(16)

    def forward(self, x):
        small = self.norm(self.shrink(x).flatten(2).transpose(1, 2))
        k, v = (split(y, 2) for y in self.kv(small).chunk(2, -1))
        q = split(self.q(x.flatten(2).transpose(1, 2)), 2)
        y = self.out(merge(F.scaled_dot_product_attention(q, k, v)))
        return y.transpose(1, 2).reshape(x.shape)


class Perceiver(nn.Module):
    """Learned queries read a sequence; their mean is classified."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 4, D))
        self.read = nn.MultiheadAttention(D, H, batch_first=True)
        self.head = nn.Linear(D, 5)

    def forward(self, x):
        latent, weights = self.read(self.queries.expand(x.shape[0], -1, -1), x, x)
        return self.head(latent.mean(1)), weights


class TalkingHeads(nn.Module):
    """Scores are mixed across heads before and after the softmax."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.before, self.after = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x):
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        scores = self.before((q @ k.mT / 8**0.5).permute(0, 2, 3, 1)).softmax(2)
        return self.out(merge(self.after(scores).permute(0, 3, 1, 2) @ v))


class NormalisedSinks(nn.Module):
    """Queries and keys normalised, and a sink a head in the softmax (gpt-oss)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.q_norm, self.k_norm = nn.RMSNorm(D // H), nn.RMSNorm(D // H)
        self.sinks = nn.Parameter(torch.randn(H, 1, 1))

    def forward(self, x):
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        scores = self.q_norm(q) @ self.k_norm(k).mT / 8**0.5
        sinks = self.sinks.expand(x.shape[0], H, x.shape[1], 1)
        return self.out(merge(torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v))


def crossed(n):
    keep = torch.rand(n, 6) > 0.3
    keep[:, 0] = True
    return torch.randn(n, T, D), torch.randn(n, 6, D), keep


BLOCKS = {
    "self_attention": Block(make=SelfAttention, inputs=rows),
    "self_attention_any_length": Block(
        make=SelfAttention, inputs=lambda n: (torch.randn(1, n, D),), dynamic=(1,), sizes=(6, 2, 8)
    ),
    "cross_attention": Block(make=CrossAttention, inputs=crossed, dynamic=(0, 0, 0)),
    "grouped_rotary": Block(make=GroupedRotary, inputs=rows),
    "cached_rotary": Block(
        make=CachedRotary,
        inputs=lambda n: (torch.randn(1, 1, D), torch.tensor([n])),
        dynamic=(None, None),
    ),
    "latent_attention": Block(make=LatentAttention, inputs=rows),
    "linear_attention": Block(make=LinearAttention, inputs=rows),
    "window_attention": Block(
        make=lambda: WindowAttention(0), inputs=lambda n: (torch.randn(n, 8, 8, D),)
    ),
    "shifted_window_attention": Block(
        make=lambda: WindowAttention(2), inputs=lambda n: (torch.randn(n, 8, 8, D),)
    ),
    "alibi_attention": Block(make=AlibiAttention, inputs=rows),
    "disentangled_attention": Block(make=DisentangledAttention, inputs=rows),
    "local_attention": Block(make=LocalAttention, inputs=rows),
    "channel_attention": Block(make=ChannelAttention, inputs=lambda n: (torch.randn(n, 16, 6, 6),)),
    "pooled_attention": Block(make=PooledAttention, inputs=lambda n: (torch.randn(n, 16, 8, 8),)),
    "perceiver": Block(make=Perceiver, inputs=rows),
    "talking_heads": Block(make=TalkingHeads, inputs=rows),
    "normalised_sinks": Block(make=NormalisedSinks, inputs=rows),
}
