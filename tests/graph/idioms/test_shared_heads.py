"""Keys and values that several heads share, and reshapes that only look like them."""

import pytest
import torch
from torch import nn

from pt2e_quant.graph.idioms.shared_heads import read_shared_heads
from pt2e_quant.graph.ops import MATMUL, is_call


class Repeated(nn.Module):
    """A product with matrices [N, 2, T, D] repeated for 3 heads each, in a shape of its own."""

    def __init__(self, *, swaps, turns=False):
        super().__init__()
        self.swaps, self.turns = swaps, turns

    def forward(self, left, x):
        n, heads, rows, columns = x.shape
        wide = x.unsqueeze(2).expand(n, heads, 3, rows, columns)
        sizes = (columns, rows) if self.swaps else (rows, columns)
        joined = wide.reshape(n, 3 * heads, *sizes)
        return left @ (joined.transpose(2, 3) if self.turns else joined)


def read(left, x, **choices):
    gm = torch.export.export(Repeated(**choices), (left, x)).module()
    (product,) = [n for n in gm.graph.nodes if is_call(n, MATMUL)]
    return product.args[0], read_shared_heads(product.args[1])


@pytest.mark.parametrize("turns", [False, True])
def test_shared_heads_when_matrices_are_repeated_then_source_and_repeats_are_read(turns):
    left, found = read(
        torch.zeros(2, 6, 4, 7 if turns else 5), torch.zeros(2, 2, 5, 7), swaps=False, turns=turns
    )
    assert (found.source.name, found.repeats, found.heads) == ("x", 3, 2)
    assert found.is_turned is turns
    assert found.has_reader(left)


def test_shared_heads_when_the_reshape_swaps_rows_and_columns_then_there_are_none():
    _, found = read(torch.zeros(2, 6, 4, 7), torch.zeros(2, 2, 5, 7), swaps=True)
    assert found is None


def test_shared_heads_when_the_left_side_has_one_head_then_it_is_no_reader():
    left, found = read(torch.zeros(2, 1, 4, 5), torch.zeros(2, 2, 5, 7), swaps=False)
    assert not found.has_reader(left)
