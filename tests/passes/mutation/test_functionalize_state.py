"""Writes of buffers and inputs, through views too, as new values and one copy at the end."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pt2e_quant.passes.mutation.functionalize_state import functionalize_state

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Shift(nn.Module):
    """The last rows it was called with, and twice the first columns of its input."""

    def __init__(self, body) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("kept", torch.arange(12.0).view(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.kept, x)


def shift(kept, x):
    kept[:-1] = kept[1:].clone()
    kept[-1] = x.mean(0)
    return x + kept.sum(0)


def write_input(kept, x):
    x[:, :2].mul_(2.0)
    return x + kept


def write_both(kept, x):
    old = kept.view(-1)[:4]
    x.transpose(0, 1)[1].add_(old[:3])
    kept.index_add_(0, torch.tensor([0, 2]), x[1:])
    return old * 1.0, x.sum()


def test_write_through_a_view_when_functional_then_one_copy_of_the_whole(program):
    p = program(Shift(shift), (X,)).apply(functionalize_state)
    p.shows(
        """
        x: f32[3, 4] = input
        clone: f32[3, 4] = clone(kept)
        slice: f32[2, 4] = slice(clone, start=1, end=9223372036854775807)
        clone_1: f32[2, 4] = clone(slice)
        slice_scatter: f32[3, 4] = slice_scatter(clone, clone_1, start=0, end=-1)
        mean: f32[4] = mean(x, [0])
        select_scatter: f32[3, 4] = select_scatter(slice_scatter, mean, 0, -1)
        sum: f32[4] = sum(select_scatter, [0])
        add: f32[3, 4] = add(x, sum)
        copy_: f32[3, 4] = copy_(kept, select_scatter)
        return (add)
        """
    )
    p.is_idempotent(functionalize_state)


@pytest.mark.parametrize("body", [shift, write_input, write_both])
def test_state_when_functional_then_results_buffers_and_inputs_are_equal(body):
    gm = torch.export.export(Shift(body).eval(), (X.clone(),)).module()
    expected = copy.deepcopy(gm)
    functionalize_state(gm)
    for seed in range(3):
        theirs = torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
        ours = theirs.clone()
        torch.testing.assert_close(gm(ours), expected(theirs), rtol=0, atol=0)
        assert torch.equal(ours, theirs)
        assert torch.equal(gm.kept, expected.kept)


def test_graph_when_it_writes_activations_alone_then_unchanged(program):
    p = program(Shift(lambda kept, x: (x + kept).relu_()), (X,))
    before = p.text
    p.apply(functionalize_state)
    assert p.text == before
