import torch
from torch import nn

from pt2e_quant.passes.cleanup.remove_identities import remove_identities

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Identities(nn.Module):
    def forward(self, x):
        y = (x + 1).to(torch.float32).detach()
        z = torch.ops.aten.alias(y.relu()).type_as(y).to("cpu")
        return z.to(torch.float64), z


def test_cast_or_alias_when_it_changes_nothing_then_removed(program):
    p = program(Identities(), (X,))
    p.shows(
        """
        x: f32[2, 3] = input
        add: f32[2, 3] = add(x, 1)
        to: f32[2, 3] = to(add, f32)
        detach: f32[2, 3] = detach(to)
        relu: f32[2, 3] = relu(detach)
        alias: f32[2, 3] = alias(relu)
        type_as: f32[2, 3] = type_as(alias, detach)
        to_1: f32[2, 3] = to(type_as, dtype=f32, layout=torch.strided, device=cpu)
        to_2: f64[2, 3] = to(to_1, f64)
        return (to_2, to_1)
        """
    )
    p.apply(remove_identities)
    p.shows(
        """
        x: f32[2, 3] = input
        add: f32[2, 3] = add(x, 1)
        relu: f32[2, 3] = relu(add)
        to: f64[2, 3] = to(relu, f64)
        return (to, relu)
        """
    )
    assert p.skips == ["the cast changes the dtype or the device"]
    p.matches(rtol=0, atol=0).is_idempotent(remove_identities)


class Branches(nn.Module):
    """A sum that starts at 0, as of branches that may be absent."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x):
        before = self.kept + 0
        self.kept.add_(1)
        return (self.layer(x) + 0) * 1.0 - 0.0, self.layer(x) + 1, x + 0, before


def test_sum_with_zero_when_of_a_layers_result_then_removed(program):
    p = program(Branches(), (X,))
    p.apply(remove_identities)
    p.matches(rtol=0, atol=0).is_idempotent(remove_identities)
    calls = [str(n.target) for n in p.gm.graph.nodes if n.op == "call_function"]
    assert [c for c in calls if "linear" not in c] == ["aten.add.Tensor", "aten.add_.Tensor"] + [
        "aten.add.Tensor"
    ] * 2
