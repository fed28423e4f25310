import torch
from torch import nn

from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants


class Unread(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x):
        self.steps.add_(1)
        return self.used(x)


def test_constant_when_nothing_reads_it_then_dropped(program):
    model = Unread()
    p = program(model, (torch.randn(2, 3),))
    p.apply(drop_dead_constants)
    assert set(p.gm.state_dict()) == {"used.weight", "used.bias", "steps"}
    assert {n.node for n in p.records[0].notes} == {"unused.weight", "unused.bias", "count"}
    assert not hasattr(p.gm, "unused")
    p.shows(
        """
        x: f32[2, 3] = input
        add_: f32[1] = add_(steps, 1)
        linear: f32[2, 3] = linear(x, used.weight, bias=used.bias)
        return (linear)
        """
    )
    assert model.unused.weight is not None, "the user's module keeps its own"
    p.is_idempotent(drop_dead_constants)


def test_call_when_its_result_is_unread_then_dropped_with_its_constants(program):
    class Dead(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            (x * self.scale).split(1)
            return x + 1

    p = program(Dead(), (torch.ones(2, 3),)).apply(drop_dead_constants)
    p.shows(
        """
        x: f32[2, 3] = input
        add: f32[2, 3] = add(x, 1)
        return (add)
        """
    )
    assert not p.gm.state_dict()


def test_drop_when_branches_have_bodies_then_the_bodies_stay(program):
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda v: self.linear(v), lambda v: v - 1, (x,))

    p = program(Branch(), (torch.ones(2, 3),)).apply(drop_dead_constants)
    assert not p.changed
    p.matches((-torch.ones(2, 3),))


def test_drop_when_a_module_is_called_then_its_constants_stay():
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    assert not drop_dead_constants(gm).changed
    assert set(gm.state_dict()) == {"0.weight", "0.bias"}


def test_drop_when_a_module_holds_only_what_its_forward_made_then_it_stays():
    """`torch.export` keeps such tensors as plain attributes, neither buffers nor parameters."""

    class Scaled(nn.Module):
        def forward(self, x):
            return x * torch.tensor([0.5]) + torch.tensor([[1.0]])

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(Scaled())
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(self.inner(x))

    model, x = Net(), torch.ones(2, 3)
    exported = torch.export.export(model, (x,)).module()
    drop_dead_constants(exported)
    torch.testing.assert_close(exported(x), model(x))
