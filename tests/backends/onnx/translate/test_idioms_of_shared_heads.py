"""Heads that share keys: one product for all of them, whatever the sizes and masks."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

from pt2e_quant.graph.idioms.shared_heads import SHARED_HEADS_RULES
from pt2e_quant.passes.attention.decompose_attention import masked_score

Change = Callable[[Tensor], Tensor]
LOW = masked_score(torch.float32)
HEADS, REPEATS, WIDTH = 2, 3, 8


def repeated(x: Tensor, repeats: int = REPEATS) -> Tensor:
    batch, heads, length, width = x.shape
    wide = x[:, :, None].expand(batch, heads, repeats, length, width)
    return wide.reshape(batch, heads * repeats, length, width)


def attention(q: Tensor, k: Tensor, v: Tensor, change: Change, spread=repeated) -> Tensor:
    """Attention of heads that are repeated by `spread`; `change` alters scores."""
    scores = change(q @ spread(k).transpose(2, 3) * 0.25)
    return torch.softmax(scores, -1) @ spread(v)


def several(q: Tensor, k: Tensor, v: Tensor, *changes: Change, spread=repeated) -> list[Tensor]:
    """Attention for each change, of other queries each time: the exporter joins what is equal."""
    return [attention(q + i, k, v, change, spread) for i, change in enumerate(changes)]


class Layers(nn.Module):
    """Two layers with the same mask, added after scaling."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        for _ in range(2):
            q = attention(q, k, v, lambda scores: scores + mask)
        return q


def arguments(batch: int = 2, rows: int = 3, columns: int = 5, seed: int = 0) -> tuple[Tensor, ...]:
    """The first row of the first mask is masked as a whole."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, HEADS * REPEATS, rows, WIDTH, generator=generator)
    k, v = torch.randn(2, batch, HEADS, columns, WIDTH, generator=generator)
    seen = torch.rand(batch, 1, rows, columns, generator=generator) > 0.4
    seen[0, 0, 0] = False
    return q, k, v, torch.zeros(seen.shape).masked_fill(~seen, LOW)


BATCH, ROWS, COLUMNS = (torch.export.Dim(n, min=1, max=64) for n in ("batch", "rows", "columns"))
SHAPES = (
    {0: BATCH, 2: ROWS},
    {0: BATCH, 2: COLUMNS},
    {0: BATCH, 2: COLUMNS},
    {0: BATCH, 2: ROWS, 3: COLUMNS},
)


@pytest.fixture(scope="module")
def grouped(exported):
    program = exported(Layers(), arguments(), SHAPES).compose(*SHARED_HEADS_RULES, fired=4)
    assert "Expand" not in program.ops()
    return program


@given(
    batch=st.integers(1, 3),
    rows=st.integers(1, 6),
    columns=st.integers(1, 9),
    seed=st.integers(0, 9),
)
@settings(max_examples=25)
def test_shared_heads_when_sizes_are_dynamic_then_equal(grouped, batch, rows, columns, seed):
    grouped.equals(*arguments(batch, rows, columns, seed), bound=4e-6)


def test_shared_heads_when_ort_optimizes_then_the_turn_is_part_of_the_product(grouped, tmp_path):
    ops = grouped.optimized_ops(tmp_path)
    assert ops["FusedMatMul"] == 2
    assert "Transpose" not in ops


MASKS = [(5,), (3, 5), (1, 5), (1, 3, 5), (2, 1, 1, 5), (1, 1, 3, 5), (2, 1, 3, 1)]


class Masked(nn.Module):
    """Attention for each shape of mask, and with scores changed in other ways."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.masks = [torch.randn(shape, generator=generator) for shape in MASKS]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        found = several(
            q,
            k,
            v,
            *(lambda s, added=added: s + added for added in self.masks),
            lambda s: torch.tanh(s / 5.0) * 5.0 + mask,
            lambda s: torch.where(mask > -1.0, s, LOW),
            lambda s: s,
        )
        return tuple(found)


def test_shared_heads_when_masks_broadcast_or_scores_are_changed_then_equal(exported):
    program = exported(Masked(), arguments()).compose(
        *SHARED_HEADS_RULES, fired=2 * (len(MASKS) + 3)
    )
    program.equals(*arguments(seed=4), bound=2e-6)


def tiled(x: Tensor) -> Tensor:
    return x.repeat(1, REPEATS, 1, 1)


def tiled_by_expand(x: Tensor) -> Tensor:
    batch, heads, length, width = x.shape
    wide = x[:, None].expand(batch, REPEATS, heads, length, width)
    return wide.reshape(batch, heads * REPEATS, length, width)


class Others(nn.Module):
    """Heads repeated in another order, masks of heads, and products of keys with other things."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        keys, values = repeated(k), repeated(v)
        chances = torch.softmax(q @ keys.transpose(2, 3) + mask, -1)
        alike = several(q, k, v, lambda s: s + q[..., :1, :1], lambda s: s + s[..., :1])
        return (
            chances @ values,
            chances,
            *alike,
            *several(q + 2, k, v, lambda s: s + mask, spread=tiled),
            *several(q + 3, k, v, lambda s: s + mask, spread=tiled_by_expand),
            torch.softmax((q + 4) @ keys.transpose(2, 3), 2) @ values,
            torch.softmax((q + 5) @ keys.transpose(2, 3), -1) @ repeated(v[:, :1], 2 * REPEATS),
            torch.softmax((q + 6) @ keys.transpose(2, 3), -1) @ values.relu(),
            torch.softmax(keys @ (q + 7).transpose(2, 3), -1) @ q,
        )


def test_shared_heads_when_other_products_are_beside_them_then_those_alone_are_stacked(exported):
    program = exported(Others(), arguments()).compose(*SHARED_HEADS_RULES, fired=11)
    assert program.ops()["Softmax"] == 9
    program.equals(*arguments(seed=5), bound=4e-6)
