"""One thread in the block, and as many as before behind it."""

from collections.abc import Iterator

import pytest
import torch

from pt2e_quant.core.one_thread import one_thread


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_threads_when_in_the_block_then_one_and_two_again_behind_it():
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_threads_when_the_block_raises_then_two_again():
    with pytest.raises(ZeroDivisionError), one_thread():
        _ = 1 / 0
    assert torch.get_num_threads() == 2


def test_threads_when_nested_then_one_until_the_outer_ends():
    with one_thread():
        with one_thread():
            pass
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
