"""Stacks of one small block repeated: graphs whose size is the only thing that varies."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ConvBlock(nn.Module):
    """Convolution, batch norm and relu at a tiny width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[N, width, H, W] to the same shape."""
        return F.relu(self.bn(self.conv(x)))


class AttentionBlock(nn.Module):
    """Four projections around one SDPA, with a residual and a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.o = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[N, tokens, width] to the same shape."""
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, width // self.heads)
        q, k, v = (project(x).view(shape).transpose(1, 2) for project in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.norm(x + self.o(attended.transpose(1, 2).reshape(batch, tokens, width)))


def conv_stack(depth: int, width: int = 8, seed: int = 0) -> nn.Module:
    """Return `depth` blocks of conv-bn-relu in eval mode, for float[N, width, H, W]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(ConvBlock(width) for _ in range(depth))).eval()


def attention_stack(depth: int, width: int = 16, seed: int = 0) -> nn.Module:
    """Return `depth` attention blocks in eval mode, for float[N, tokens, width]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(AttentionBlock(width, heads=2) for _ in range(depth))).eval()


def conv_stack_input(width: int = 8, size: int = 8, seed: int = 1) -> tuple[Tensor]:
    """Return one seeded input float[1, width, size, size]."""
    return (torch.randn(1, width, size, size, generator=torch.Generator().manual_seed(seed)),)


def attention_stack_input(width: int = 16, tokens: int = 8, seed: int = 1) -> tuple[Tensor]:
    """Return one seeded input float[1, tokens, width]."""
    return (torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed)),)
