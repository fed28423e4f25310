"""Rotary embeddings on one kernel: within a rounding of the spelling, and only that spelling."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from pt2e_quant.graph.idioms.rotary_embedding import rotary_rule

HEADS, WIDTH = 3, 8
EPS = torch.finfo(torch.float32).eps
RATES = 10.0 ** -torch.arange(0, WIDTH // 2).float()


def turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotated(x: Tensor, angles: Tensor, factor: float = 1.0) -> Tensor:
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return x * cos[:, None] + turned(x) * sin[:, None]


class Rotary(nn.Module):
    """Queries and keys, and a part of the queries; tables by position."""

    def forward(self, at: Tensor, q: Tensor, k: Tensor, long: Tensor) -> tuple[Tensor, ...]:
        angles = at[None, :, None].float() * RATES
        angles = torch.cat((angles, angles), -1)
        part = rotated(long[..., :WIDTH], angles, 1.25)
        rest = torch.cat((part, long[..., WIDTH:]), -1)
        return rotated(q, angles), rotated(k, angles), rest


def arguments(batch: int, start: int, tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, HEADS, tokens, WIDTH, generator=generator)
    k = torch.randn(batch, 1, tokens, WIDTH, generator=generator)
    long = torch.randn(batch, HEADS, tokens, WIDTH + 4, generator=generator)
    return torch.arange(start, start + tokens), q, k, long


@pytest.fixture(scope="module")
def rotary(exported):
    batch, tokens = (torch.export.Dim(n, min=1, max=64) for n in ("batch", "tokens"))
    whole = {0: batch, 2: tokens}
    shapes = ({0: tokens}, whole, whole, whole)
    return exported(Rotary(), arguments(2, 0, 5), shapes).compose(rotary_rule(), fired=3)


@given(
    batch=st.integers(1, 3),
    start=st.integers(0, 5000),
    tokens=st.integers(1, 9),
    seed=st.integers(0, 9),
)
@settings(max_examples=25)
def test_rotary_embedding_when_sizes_and_positions_vary_then_within_rounding(
    rotary, batch, start, tokens, seed
):
    args = arguments(batch, start, tokens, seed)
    # Two products and a sum of them, of numbers up to 1.25 times the greatest.
    rotary.equals(*args, bound=3 * EPS * 1.25 * max(float(x.abs().max()) for x in args[1:]))


def test_rotary_embedding_when_layers_share_tables_then_each_is_halved_once(rotary):
    ops = rotary.ops()
    assert ops["RotaryEmbedding"] == 3
    assert "Neg" not in ops
    kept = 2  # of `long`, which is rotated in part
    assert ops["Slice"] - kept == 4  # cos and sin, by each factor


class Others(nn.Module):
    """Halves of different angles, angles for each sequence, other turns, and float64."""

    def forward(self, x: Tensor, angles: Tensor, each: Tensor) -> tuple[Tensor, ...]:
        twice = torch.cat((angles, angles), -1)
        apart = torch.cat((angles, angles * 2), -1)
        pairs = torch.stack((angles, angles), -1).flatten(-2)
        both = torch.cat((each, each), -1)
        half = WIDTH // 2
        cos, sin = twice.cos()[:, None], twice.sin()[:, None]
        swapped = torch.cat((x[..., half:], -x[..., :half]), -1)
        uneven = torch.cat((-x[..., half - 1 :], x[..., : half - 1]), -1)
        return (
            rotated(x, apart),
            rotated(x.double(), twice.double()),
            rotated(x, pairs),
            rotated(x, both),
            x * both.cos()[None, :] + turned(x) * both.sin()[None, :],
            x * cos + swapped * sin,
            x * cos + uneven * sin,
            x * cos - turned(x) * sin,
            (x + 1) * cos + turned(x) * sin,
            x * twice[:, None] + turned(x) * angles.sum(-1, keepdim=True)[:, None],
        )


def test_rotary_embedding_when_it_is_another_rotation_then_it_declines(exported):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, 5, WIDTH, generator=generator)
    angles = torch.randn(1, 5, WIDTH // 2, generator=generator)
    each = torch.randn(2, 5, WIDTH // 2, generator=generator)
    program = exported(Others(), (x, angles, each)).compose(rotary_rule(), fired=0)
    program.equals(x, angles, each)
