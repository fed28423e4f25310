"""Pairs of weights whose products fit into 16 bits."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.pair_sums import MOST, fitted, greatest_pairs

shapes = st.one_of(
    st.tuples(st.integers(1, 5), st.integers(1, 9)),
    st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.integers(1, 3)),
)


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int32)


def neighbours(row: torch.Tensor) -> list[tuple[int, int]]:
    """The pairs of a row [channels, *window], written with loops."""
    channels = row.shape[0]
    positions = row.flatten(1).T.tolist() if row.dim() > 1 else [row.tolist()]
    flat = [code for position in positions for code in position]
    found = [
        (position[at], position[at + 1] if at + 1 < channels else 0)
        for position in positions
        for at in range(0, channels, 2)
    ]
    return found + [(flat[at], flat[at + 1]) for at in range(0, len(flat) - 1, 2)]


def one_sign(pair: tuple[int, int]) -> int:
    return max(sum(max(c, 0) for c in pair), sum(max(-c, 0) for c in pair))


@settings(max_examples=60, deadline=None)
@given(shape=shapes, seed=st.integers(0, 999))
def test_greatest_pairs_when_drawn_then_as_loops_find_them(shape, seed) -> None:
    codes = drawn(shape, seed)
    expected = [max(map(one_sign, neighbours(row))) for row in codes]
    assert greatest_pairs(codes).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(shape=shapes, seed=st.integers(0, 999))
def test_fitted_when_drawn_then_pairs_fit_and_others_are_as_they_were(shape, seed) -> None:
    codes = drawn(shape, seed)
    made = fitted(codes)
    assert made.shape == codes.shape
    assert made.dtype == codes.dtype
    assert float(greatest_pairs(made).max()) <= MOST
    assert bool((made.abs() <= codes.abs()).all())
    assert bool((made * codes >= 0).all())
    fits = greatest_pairs(codes) <= MOST
    assert torch.equal(made[fits], codes[fits])


def test_fitted_when_a_pair_is_over_then_its_greater_gives_way() -> None:
    assert fitted(torch.tensor([[100, 60, -127, -2, 90, -90]])).tolist() == [
        [68, 60, -126, -2, 90, -90]
    ]


def test_greatest_pairs_when_rows_are_empty_then_zero() -> None:
    assert greatest_pairs(torch.zeros(3, 0)).tolist() == [0.0, 0.0, 0.0]


def test_most_when_activations_are_largest_then_no_more_fits_into_16_bits() -> None:
    assert 255 * MOST < 2**15 <= 255 * (MOST + 1)
