import torch
from torch import nn

from pt2e_quant.passes.cleanup.remove_identities import broadcast_expanded, remove_noop_expand

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Expands(nn.Module):
    def forward(self, x):
        same = x.relu().expand(2, 3)
        kept = same.expand(-1, 3)
        return kept.sum(0, keepdim=True).expand(2, 3), kept.expand(4, 2, 3)


def test_expand_when_the_shape_is_the_same_then_removed(program):
    p = program(Expands(), (X,)).apply(remove_noop_expand)
    p.shows(
        """
        x: f32[2, 3] = input
        relu: f32[2, 3] = relu(x)
        sum: f32[1, 3] = sum(relu, [0], keepdim=True)
        expand: f32[2, 3] = expand(sum, [2, 3])
        expand_1: f32[4, 2, 3] = expand(relu, [4, 2, 3])
        return (expand, expand_1)
        """
    )
    assert p.skips == ["the expand changes the shape", "the expand adds dimensions"]
    p.matches(rtol=0, atol=0).is_idempotent(remove_noop_expand)


def test_expand_when_sizes_are_symbolic_then_removed_only_if_equal(program):
    class Dynamic(nn.Module):
        def forward(self, x, y):
            return x.expand(x.shape[0], 3), x.sum(0).expand(y.shape[0], 3)

    rows, other = (torch.export.Dim(n, min=2, max=9) for n in ("rows", "other"))
    p = program(Dynamic(), (X, X + 1), ({0: rows}, {0: other})).apply(remove_noop_expand)
    assert p.targets()["aten.expand.default"] == 1
    p.matches((torch.randn(5, 3), torch.randn(7, 3)))


class Broadcasts(nn.Module):
    def forward(self, x, y):
        row = x.sum(0, keepdim=True)
        scaled = x / row.expand_as(x)
        same = row.expand(2, 3) * row.expand(2, 3)
        longer = x + y.expand(4, 2, 3)
        return scaled, same, longer, torch.add(row.expand(2, 3), x, alpha=2)


def test_expand_when_read_beside_a_larger_operand_then_broadcast(program):
    p = program(Broadcasts(), (X, X + 1)).apply(broadcast_expanded)
    p.shows(
        """
        x: f32[2, 3] = input
        y: f32[2, 3] = input
        sum: f32[1, 3] = sum(x, [0], keepdim=True)
        div: f32[2, 3] = div(x, sum)
        expand: f32[2, 3] = expand(sum, [2, 3])
        mul: f32[2, 3] = mul(sum, expand)
        expand_1: f32[4, 2, 3] = expand(y, [4, 2, 3])
        add: f32[4, 2, 3] = add(x, expand_1)
        add_1: f32[2, 3] = add(sum, x, alpha=2)
        return (div, mul, add, add_1)
        """
    )
    p.matches(rtol=0, atol=0)
