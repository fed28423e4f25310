import operator

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

import pt2e_quant as pq
from pt2e_quant.accelerate.patch import Patch
from pt2e_quant.accelerate.recompile import PATCH, recompile, write_code

pytestmark = pytest.mark.skipif(not PATCH.is_on(), reason="another torch: its code is its own")


class Block(nn.Module):
    """Views with lists, a getitem, keyword arguments, a buffer written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x, *, scale=1.0):
        self.count.add_(1)
        a, b = self.linears[0](x).split([3, 5], dim=-1)
        y = torch.cat([a, b.to(torch.float32)], -1)
        y = nn.functional.gelu(self.linears[1](y), approximate="tanh")
        y = y.masked_fill(y < -1.0, float("-inf")).clamp(min=-3.0)
        return {"y": y * scale, "pair": (x, y.view(x.shape[0], -1))}


class Branches(nn.Module):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def same_code(gm):
    written, expected = write_code(gm.graph), gm.graph.python_code("self")
    assert written is not None
    assert written.src == expected.src
    assert written.globals == expected.globals
    assert written._lineno_map == expected._lineno_map
    assert written._prologue_start == expected._prologue_start


def graph_of(build):
    """A graph module of one input, what `build` makes of it, and an output."""
    graph = Graph()
    x = graph.placeholder("x")
    graph.output(build(graph, x))
    return GraphModule(nn.Module(), graph)


def renamed(node, name):
    node.name = name  # as an editor may that does not ask the graph for a free one
    return node


def example(rows=2):
    return (torch.linspace(-2, 2, 8 * rows).reshape(rows, 8),)


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_code_when_written_at_every_stage_then_that_of_torch_fx(is_dynamic, plain_backend):
    shapes = {"x": {0: torch.export.Dim("rows", max=64)}, "scale": None} if is_dynamic else None
    ep = torch.export.export(Block().eval(), example(), {"scale": 2.0}, dynamic_shapes=shapes)
    gm = ep.module()
    same_code(gm)
    prepared = pq.prepare_pt2e(gm, plain_backend.quantizer("int8"))
    same_code(prepared)
    prepared(*example(), scale=2.0)
    converted = pq.convert_pt2e(prepared)
    same_code(converted)
    assert converted.code == converted.graph.python_code("self").src


@pytest.mark.parametrize(
    "build",
    [
        lambda g, x: g.call_function(torch.ops.aten.add.Tensor, (x, 1), {"alpha": 2}),
        lambda g, x: g.call_function(operator.getitem, (x, 0)),
        lambda g, x: (x, [x, None], (x,), (), [], float("nan"), "a\nb", torch.device("cpu")),
        lambda g, x: g.call_function(torch.ops.aten.sum.dim_IntList, (x, [0, -1], True)),
    ],
)
def test_code_when_arguments_are_of_any_kind_then_written_as_torch_fx(build):
    same_code(graph_of(build))


def test_code_when_a_name_is_no_identifier_then_read_with_getattr():
    gm = graph_of(lambda g, x: x)
    gm.add_module("0", nn.Linear(2, 2))
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        called = gm.graph.call_module("0", (gm.graph.get_attr("0.weight"),))
    output.args = (called,)
    same_code(gm)
    recompile(gm)
    assert torch.equal(gm(None), gm.get_submodule("0")(gm.get_submodule("0").weight))


@pytest.mark.parametrize(
    "build",
    [
        lambda g, x: g.call_function(torch.add, (x, x)),
        lambda g, x: g.call_function(operator.mul, (x, 2)),
        lambda g, x: g.call_method("neg", (x,)),
        lambda g, x: g.call_function(operator.getitem, (x, slice(0, 1))),
        lambda g, x: renamed(g.call_function(torch.ops.aten.neg.default, (x,)), "device"),
        lambda g, x: g.call_function(torch.ops.aten.neg.default, (x,), type_expr=torch.Tensor),
    ],
)
def test_code_when_the_graph_is_unusual_then_left_to_torch_fx(build):
    gm = graph_of(build)
    assert write_code(gm.graph) is None
    recompile(gm)
    x = torch.ones(3)
    assert gm(x) is not None
    assert gm.code == gm.graph.python_code("self").src


def test_code_when_control_flow_or_another_torch_then_left_to_torch_fx(monkeypatch):
    gm = torch.export.export(Branches(), (torch.ones(2),)).module()
    assert write_code(gm.graph) is None
    gm = torch.export.export(Block().eval(), example()).module()
    assert write_code(gm.graph) is not None
    old = Patch(name=PATCH.name, saves="", versions={"torch": "2.99"})
    monkeypatch.setattr("pt2e_quant.accelerate.recompile.PATCH", old)
    assert write_code(gm.graph) is None
    recompile(gm)
    assert torch.equal(gm(*example())["y"], gm(*example())["y"])


def test_recompile_when_the_graph_was_edited_then_its_code_is_the_new_one():
    gm = torch.export.export(Block().eval(), example()).module()
    gelu = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.gelu.default)
    gelu.update_kwarg("approximate", "none")
    recompile(gm)
    assert "approximate = 'none'" in gm.code
    assert "python_code" not in vars(gm.graph)
