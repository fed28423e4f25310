"""Graphs, points, sound, tables, codes, weights made by networks, and other unusual blocks."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.block import Block

__all__ = ["BLOCKS"]


class GraphConvolution(nn.Module):
    """Two layers over a dense, normalised adjacency matrix, then the mean of nodes."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x, edges):
        adjacency = edges + torch.eye(x.shape[1])
        degree = adjacency.sum(-1).rsqrt()
        adjacency = degree[:, :, None] * adjacency * degree[:, None]
        y = F.relu(self.first(adjacency @ x))
        return self.head(self.last(adjacency @ y).mean(1))


class GraphAttention(nn.Module):
    """Scores of neighbours by two vectors (GAT); edges that are not there are masked."""

    def __init__(self):
        super().__init__()
        self.layer, self.source, self.target = nn.Linear(8, 12), nn.Linear(12, 1), nn.Linear(12, 1)

    def forward(self, x, edges):
        y = self.layer(x)
        scores = F.leaky_relu(self.source(y) + self.target(y).mT, 0.2)
        scores = scores.masked_fill(edges < 0.5, -1e9)
        return F.elu(scores.softmax(-1) @ y)


class MessagePassing(nn.Module):
    """Messages along a list of edges, summed where they arrive (index_add)."""

    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(16, 12), nn.Linear(20, 8)

    def forward(self, x, source, target):
        sent = F.relu(self.message(torch.cat([x[source], x[target]], -1)))
        arrived = torch.zeros(x.shape[0], 12).index_add(0, target, sent)
        return self.update(torch.cat([x, arrived], -1))


class Spectrogram(nn.Module):
    """A short Fourier transform as a convolution, mel bands, a logarithm, a small net."""

    def __init__(self):
        super().__init__()
        t, f = torch.arange(32.0), torch.arange(17.0)[:, None]
        angle = 2 * math.pi * f * t / 32
        basis = torch.cat([angle.cos(), -angle.sin()]) * torch.hann_window(32)
        self.register_buffer("basis", basis[:, None])
        self.register_buffer("mel", torch.rand(17, 8))
        self.conv, self.head = nn.Conv1d(8, 12, 3, padding=1), nn.Linear(12, 4)

    def forward(self, wave):
        real, imaginary = F.conv1d(wave[:, None], self.basis, stride=16).chunk(2, 1)
        power = real.square() + imaginary.square()
        mel = torch.log10((power.mT @ self.mel).clamp(min=1e-5)).mT
        mel = (mel - mel.mean((1, 2), keepdim=True)) / 4
        return self.head(F.relu(self.conv(mel)).mean(-1))


class WaveEncoder(nn.Module):
    """Strided convolutions of a waveform with norms over groups (wav2vec 2)."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv1d(1, 12, 10, 5, bias=False), nn.GroupNorm(12, 12)
        self.next, self.last = nn.Conv1d(12, 16, 3, 2), nn.Linear(16, 8)
        self.place = nn.Conv1d(8, 8, 4, padding=2, groups=2)

    def forward(self, wave):
        y = F.gelu(self.next(F.gelu(self.norm(self.first(wave[:, None])))))
        y = self.last(y.transpose(1, 2))
        return y + F.gelu(self.place(y.transpose(1, 2))[..., :-1]).transpose(1, 2)


class Vocoder(nn.Module):
    """Transposed convolutions with snake activations and a residual stack."""

    def __init__(self):
        super().__init__()
        self.first, self.up = nn.Conv1d(8, 16, 7, padding=3), nn.ConvTranspose1d(16, 8, 8, 4, 2)
        self.inner, self.last = nn.Conv1d(8, 8, 3, padding=3, dilation=3), nn.Conv1d(8, 1, 7)
        self.rate = nn.Parameter(torch.rand(8, 1) + 0.5)

    def forward(self, mel):
        y = self.up(F.leaky_relu(self.first(mel), 0.1))
        y = y + self.inner(y + torch.sin(self.rate * y).square() / self.rate)
        return torch.tanh(self.last(F.pad(y, (3, 3), mode="reflect")))


class HyperNetwork(nn.Module):
    """The weights of a linear and of a convolution are made from a condition."""

    def __init__(self):
        super().__init__()
        self.make, self.encode = nn.Linear(6, 8 * 5), nn.Linear(10, 8)

    def forward(self, x, condition):
        weights = self.make(condition).view(-1, 5, 8)
        return torch.bmm(self.encode(x), weights.transpose(1, 2)).relu()


class LowRank(nn.Module):
    """A linear with an adapter beside it (LoRA), and one with a weight by magnitude (DoRA)."""

    def __init__(self):
        super().__init__()
        self.base, self.a, self.b = (
            nn.Linear(16, 12),
            nn.Linear(16, 2, False),
            nn.Linear(2, 12, False),
        )
        self.magnitude = nn.Parameter(torch.rand(12, 1) + 0.5)

    def forward(self, x):
        y = self.base(x) + 0.5 * self.b(self.a(x))
        weight = self.base.weight + self.b.weight @ self.a.weight
        return y + F.linear(x, self.magnitude * F.normalize(weight, dim=1))


class Recommender(nn.Module):
    """Tables of ids, dot products between all fields, and dense features (DLRM)."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(20, 8) for _ in range(3))
        self.dense, self.top = nn.Linear(5, 8), nn.Linear(8 + 6, 1)
        self.register_buffer("pairs", torch.tril_indices(4, 4, -1))

    def forward(self, dense, ids):
        y = F.relu(self.dense(dense))
        fields = torch.stack([y, *(t(ids[:, i]) for i, t in enumerate(self.tables))], 1)
        products = (fields @ fields.mT)[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.top(torch.cat([y, products], 1)))


class ResidualCodes(nn.Module):
    """A vector, its nearest code, what is left, its nearest code (residual vector quantizer)."""

    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(16, 8), nn.Linear(8, 16)
        self.books = nn.ParameterList(torch.randn(12, 8) for _ in range(2))

    def forward(self, x):
        rest = self.into(x)
        total = torch.zeros_like(rest)
        for book in self.books:
            code = F.embedding(torch.cdist(rest, book).argmin(-1), book)
            rest, total = rest - code, total + code
        return self.out(total)


class Splines(nn.Module):
    """Radial functions of each input, weighted a pair of input and output (KAN)."""

    def __init__(self):
        super().__init__()
        self.norm, self.base, self.spline = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(30, 10)
        self.register_buffer("grid", torch.linspace(-2, 2, 5))

    def forward(self, x):
        basis = torch.exp(-((self.norm(x)[..., None] - self.grid) ** 2))
        return self.base(F.silu(x)) + self.spline(basis.flatten(-2))


class RadianceField(nn.Module):
    """Sines of a position at many frequencies, a deep MLP with a skip, density and colour."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(27, 24), nn.Linear(51, 24)
        self.density, self.colour = nn.Linear(24, 1), nn.Linear(24, 3)
        self.register_buffer("rates", 2.0 ** torch.arange(4))

    def forward(self, x):
        angle = (x[..., None] * self.rates).flatten(-2)
        code = torch.cat([x, angle.sin(), angle.cos()], -1)
        y = F.relu(self.second(torch.cat([F.relu(self.first(code)), code], -1)))
        return {"density": F.softplus(self.density(y)), "colour": torch.sigmoid(self.colour(y))}


class PointNet(nn.Module):
    """A small net for each point, aligned by a predicted matrix, and the greatest of all."""

    def __init__(self):
        super().__init__()
        self.align, self.conv = nn.Conv1d(3, 9, 1), nn.Conv1d(3, 16, 1)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, points):
        matrix = self.align(points).amax(-1).view(-1, 3, 3) + torch.eye(3)
        y = F.relu(self.norm(self.conv(torch.bmm(matrix, points))))
        return self.head(y.amax(-1))


class Coupling(nn.Module):
    """Half the features are scaled and shifted by a net of the other half (a flow)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        a, b = x[..., ::2], x[..., 1::2]
        scale, shift = self.net(a).chunk(2, -1)
        scale = torch.tanh(scale)
        y = torch.stack([a, b * scale.exp() + shift], -1).flatten(-2)
        return y, scale.sum(-1)


class Routing(nn.Module):
    """A model of two paths, chosen by the input's mean (torch.cond)."""

    def __init__(self):
        super().__init__()
        self.first, self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = F.relu(self.first(x))
        return torch.cond(x.mean() > 0, lambda a: self.small(a), lambda a: self.large(a), (y,))


def graph(n):
    return torch.randn(n, 6, 8), (torch.rand(n, 6, 6) > 0.5).float()


def edges(n):
    return torch.randn(n + 4, 8), torch.randint(0, 5, (9,)), torch.randint(0, 5, (9,))


BLOCKS = {
    "graph_convolution": Block(make=GraphConvolution, inputs=graph, dynamic=(0, 0)),
    "graph_attention": Block(make=GraphAttention, inputs=graph, dynamic=(0, 0)),
    "message_passing": Block(
        make=MessagePassing, inputs=edges, dynamic=(None, None, None), sizes=(2,)
    ),
    "spectrogram": Block(make=Spectrogram, inputs=lambda n: (torch.randn(n, 128),)),
    "wave_encoder": Block(make=WaveEncoder, inputs=lambda n: (torch.randn(n, 120),)),
    "vocoder": Block(make=Vocoder, inputs=lambda n: (torch.randn(n, 8, 10),)),
    "hyper_network": Block(
        make=HyperNetwork,
        inputs=lambda n: (torch.randn(n, 4, 10), torch.randn(n, 6)),
        dynamic=(0, 0),
    ),
    "low_rank": Block(make=LowRank, inputs=lambda n: (torch.randn(n, 16),)),
    "recommender": Block(
        make=Recommender,
        inputs=lambda n: (torch.randn(n, 5), torch.randint(0, 20, (n, 3))),
        dynamic=(0, 0),
    ),
    "residual_codes": Block(make=ResidualCodes, inputs=lambda n: (torch.randn(n, 5, 16),)),
    "splines": Block(make=Splines, inputs=lambda n: (torch.randn(n, 6),)),
    "radiance_field": Block(make=RadianceField, inputs=lambda n: (torch.rand(n, 7, 3),)),
    "point_net": Block(make=PointNet, inputs=lambda n: (torch.randn(n, 3, 20),)),
    "coupling": Block(make=Coupling, inputs=lambda n: (torch.randn(n, 8),)),
    "routing": Block(make=Routing, inputs=lambda n: (torch.randn(n, 8),)),
}
