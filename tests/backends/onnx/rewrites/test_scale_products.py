"""Products with quantized caches: scales on what is smaller, and others left alone."""

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from pt2e_quant.backends.onnx.rewrites.integer_products import scale_products

ROOM = 10


class Attention(nn.Module):
    """Keys and values as integers and the scales of their rows; the values' as halves."""

    def forward(self, q: Tensor, keys: Tensor, values: Tensor, s: Tensor, t: Tensor) -> Tensor:
        scores = q @ (keys.float() * s).transpose(1, 2)
        both = values.float()
        second = torch.floor(both * (1 / 16) + 0.5)
        halves = torch.cat((both - second * 16, second), -1)
        return torch.softmax(scores / 16, -1) @ (halves * t)


def arguments(tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def codes(width: int) -> Tensor:
        return torch.randint(-119, 120, (2, ROOM, width), generator=generator).to(torch.int8)

    scales = torch.rand(2, 2, ROOM, 1, generator=generator) / 64
    q = torch.randn(2, tokens, 8, generator=generator)
    return q, codes(8), codes(4), scales[0], scales[1]


def test_products_when_their_right_side_is_a_cache_then_scaled_behind_and_in_front(exported):
    tokens = torch.export.Dim("tokens", min=1, max=ROOM)
    shapes = ({1: tokens}, None, None, None, None)
    program = exported(Attention(), arguments(3), shapes).apply(scale_products, fired=2)
    for count in (1, 3, ROOM):
        # Sums of 8 and of 10 products of the same values in another order.
        program.equals(*arguments(count, count), bound=1e-5)
    cache = (2, ROOM, 8)
    sizes = [tuple(n.outputs[0].shape or ()) for n in program.model.graph if n.op_type == "Mul"]
    assert cache not in sizes


class Others(nn.Module):
    """Scales of columns, of one for all, a cache that is read twice, one of floats."""

    def forward(self, q: Tensor, k: Tensor, s: Tensor, c: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        real = k.float() * s
        return (
            q @ real.transpose(1, 2),
            real + 1,
            q @ (k.float() * c).transpose(1, 2),
            q @ (x * s).transpose(1, 2),
        )


def test_products_when_of_another_form_then_they_stay(exported):
    q, keys, _, scales, _ = arguments(3)
    args = q, keys, scales, torch.rand(2, 1, 8), torch.randn(2, ROOM, 8)
    exported(Others(), args).apply(scale_products, fired=0).equals(*args)
