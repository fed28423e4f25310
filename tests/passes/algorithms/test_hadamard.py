"""Hadamard matrices and rotations."""

import pytest
import torch

from pt2e_quant.passes.algorithms.quarot import hadamard, rotation


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 20, 28, 36, 40, 56, 76, 84, 384, 768, 896])
def test_hadamard_when_a_construction_fits_then_rows_of_one_and_minus_one_are_orthogonal(size):
    found = hadamard(size)
    assert found is not None
    assert set(found.unique().tolist()) <= {1, -1}
    assert torch.equal(found.int() @ found.int().T, size * torch.eye(size, dtype=torch.int32))


@pytest.mark.parametrize("size", [3, 6, 52])
def test_rotation_when_no_construction_fits_then_orthogonal_all_the_same(size):
    assert hadamard(size) is None
    turn = rotation(size, seed=1)
    torch.testing.assert_close(turn @ turn.T, torch.eye(size, dtype=torch.float64))


def test_rotation_when_seeded_then_the_same_again_and_another_by_another_seed():
    assert torch.equal(rotation(12, seed=3), rotation(12, seed=3))
    assert not torch.equal(rotation(12, seed=3), rotation(12, seed=4))
