import torch
from torch import nn

from pt2e_quant.graph.subgraphs import bodies


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(1))


def constant_operands(gm):
    return {inner: outer for body in bodies(gm) for inner, outer in body.constants.items()}


def outer_names(gm):
    return sorted(str(outer.target) for outer in constant_operands(gm).values())


X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def test_constants_when_branches_read_weights_then_traced_to_the_module():
    class Branch(Weighted):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda v: self.fc(v), lambda v: v - 1, (x,))

    gm = torch.export.export(Branch(), (X,)).module()
    assert outer_names(gm) == ["fc.bias", "fc.bias", "fc.weight", "fc.weight"]
    assert [b.name for b in bodies(gm)] == ["true_graph_0", "false_graph_0"]
    for inner, outer in constant_operands(gm).items():
        assert inner.op == "placeholder"
        assert inner.meta["val"].shape == outer.meta["val"].shape


def test_constants_when_branches_are_nested_then_traced_to_the_module():
    class Nested(Weighted):
        def forward(self, x):
            def then(v):
                return torch.cond(v.max() > 1, lambda u: self.fc(u), lambda u: u * 2, (v,))

            return torch.cond(x.sum() > 0, then, lambda v: v - 1, (x,))

    gm = torch.export.export(Nested(), (X,)).module()
    inner = [b for b in bodies(gm) if "." in b.name]
    assert [b.name for b in inner] == ["true_graph_0.true_graph_0", "true_graph_0.false_graph_0"]
    assert sorted(str(n.target) for n in inner[0].constants.values()) == ["fc.bias", "fc.weight"]
    assert all(n.graph is gm.graph for n in inner[0].constants.values())


def test_constants_when_a_loop_carries_a_value_then_not_among_them():
    from torch._higher_order_ops import while_loop

    class Loop(Weighted):
        def forward(self, x):
            def body(i, v):
                return i + 1, self.fc(v)

            return while_loop(lambda i, v: i < 3, body, (torch.zeros((), dtype=torch.int64), x))

    gm = torch.export.export(Loop(), (X,)).module()
    names = set(outer_names(gm))
    assert names == {"fc.bias", "fc.weight"}


def test_constants_when_a_buffer_is_written_then_not_among_them():
    class Counts(Weighted):
        def forward(self, x):
            self.count.add_(1)
            c = self.count
            return torch.cond(x.sum() > 0, lambda v: v + c, lambda v: v - 1, (x,))

    gm = torch.export.export(Counts(), (X,)).module()
    assert constant_operands(gm) == {}
