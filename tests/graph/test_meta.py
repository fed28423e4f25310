import torch
import torch.nn.functional as F
from torch import nn

from pt2e_quant.graph.meta import (
    constant_nodes,
    constant_of,
    fake_mode_of,
    fake_value,
    give_values,
    source_constant,
)
from pt2e_quant.graph.ops import aten


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(12.0).view(3, 4))
        self.register_buffer("written", torch.zeros(4, 3))

    def forward(self, x):
        self.written[1:].add_(1)
        y = F.linear(x, self.w.t().contiguous().to(torch.bfloat16).float().t())
        return y, F.linear(x, self.written.t()), F.linear(x, self.w + 0)


ROWS = torch.export.Dim("rows", min=2, max=9)
PROGRAM = torch.export.export(Weights(), (torch.ones(2, 4),), dynamic_shapes=({0: ROWS},))


def weights():
    gm = PROGRAM.module()
    return gm, [n.args[1] for n in gm.graph.nodes if n.target is aten.linear.default]


def test_constant_when_behind_views_and_casts_then_read():
    gm, (viewed, written, computed) = weights()
    assert torch.equal(constant_of(gm, viewed), gm.w.detach())
    assert source_constant(viewed).target == "w"
    assert constant_of(gm, computed) is None
    assert source_constant(computed) is None
    assert constant_of(gm, written) is None
    constants = constant_nodes(gm.graph)
    assert viewed in constants
    assert written not in constants
    assert computed not in constants


def test_fake_value_when_sizes_are_symbolic_then_kept_without_a_guard():
    gm, _ = weights()
    x = next(n for n in gm.graph.nodes if n.op == "placeholder")
    mode = fake_mode_of(gm.graph)
    guards = len(mode.shape_env.guards)
    value = fake_value(mode, aten.cat.default, ([x, x], 1), {})
    assert isinstance(value.shape[0], torch.SymInt)
    assert value.shape[1] == 8
    assert len(mode.shape_env.guards) == guards
    assert mode.cache_enabled


def test_fake_value_when_an_operator_takes_symbolic_sizes_in_python_alone_then_taken():
    gm, _ = weights()
    x = next(n for n in gm.graph.nodes if n.op == "placeholder")
    mode = fake_mode_of(gm.graph)
    image = fake_value(mode, aten.unsqueeze.default, (x, 0), {})
    rows = image.shape[1]
    value = fake_value(mode, aten.upsample_nearest1d.vec, (image, [rows], None), {})
    assert value.shape[-1] is rows or str(value.shape[-1]) == str(rows)


def test_fake_mode_when_the_graph_has_no_values_then_a_fresh_one():
    gm = torch.fx.symbolic_trace(nn.ReLU())
    assert fake_mode_of(gm.graph) is not None


@torch.library.custom_op("test_meta::without_fake", mutates_args=())
def without_fake(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_values_when_an_operator_has_no_fake_kernel_then_it_and_its_readers_have_none():
    gm = PROGRAM.module()
    (x,) = (n for n in gm.graph.nodes if n.op == "placeholder")
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        weight = gm.graph.get_attr("w")
        product = gm.graph.call_function(aten.linear.default, (x, weight))
        blind = gm.graph.call_function(torch.ops.test_meta.without_fake.default, (product,))
        behind = gm.graph.call_function(aten.relu.default, (blind,))
    give_values(gm, fake_mode_of(gm.graph), weight, output)
    assert weight.meta["val"].shape == (3, 4)
    assert product.meta["val"].shape[1] == 3
    assert "val" not in blind.meta
    assert "val" not in behind.meta
