import itertools

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import nn

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.graph.ops import (
    ADD,
    BATCH_NORM,
    CAT,
    CLAMP,
    CONV2D,
    HARDTANH,
    LINEAR,
    MUL,
    PERMUTE,
    RELU,
    RELU6,
    SIGMOID,
    aten,
    overload,
)
from pt2e_quant.graph.pattern import (
    Attempt,
    Lit,
    Many,
    Op,
    Var,
    chain,
    either_order,
    find_matches,
    maybe,
    one_of,
    step,
    ties,
)

CONV = Op(CONV2D, Var("x"), Var("w"), Var("b"), name="conv")
IMAGE = torch.ones(2, 3, 6, 6)


def graph_of(forward, *args, **modules):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            for name, module in modules.items():
                setattr(self, name, module)

        def forward(self, x, y=None):
            return forward(self, x) if y is None else forward(self, x, y)

    return torch.export.export(Model().eval(), args).module().graph


def names(matches):
    return [(key, m.anchor.name) for key, m in matches]


def test_match_when_rows_are_in_any_order_then_the_widest_chain_wins():
    def forward(m, x):
        y = F.relu(m.bn(m.conv(x)))
        return m.conv(y) + 1

    graph = graph_of(forward, IMAGE, conv=nn.Conv2d(3, 3, 1), bn=nn.BatchNorm2d(3))
    rows = list(chain(CONV, maybe(BATCH_NORM, "bn"), maybe(one_of(RELU, RELU6), "act")))
    assert [op.width for op in rows] == [3, 2, 2, 1]
    for order in itertools.permutations(range(len(rows))):
        found = find_matches(graph, [(rows[i].width, rows[i]) for i in order])
        assert names(found) == [(3, "relu"), (1, "conv2d_1")]
    match = find_matches(graph, [("c", op) for op in rows])[0][1]
    assert [n.name for n in match.covered] == ["conv2d", "batch_norm", "relu"]
    assert match.nodes["bn"].name == "batch_norm"
    assert match["x"].name == "x"
    assert [n.name for n in match.edge("w")] == ["conv_weight", "conv2d"]


@pytest.mark.parametrize(
    "act",
    [
        nn.ReLU6(),
        nn.ReLU6(inplace=True),
        nn.Hardtanh(0.0, 6.0),
        nn.Hardtanh(0, 6, inplace=True),
        lambda x: x.clamp(0, 6),
        lambda x: x.clamp_(0.0, 6.0),
        F.relu6,
    ],
)
def test_match_when_relu6_is_in_any_form_then_found(act):
    graph = graph_of(lambda m, x: act(m.conv(x)), IMAGE, conv=nn.Conv2d(3, 3, 1))
    found = find_matches(graph, [("relu6", Op(RELU6, CONV, name="act"))])
    assert len(found) == 1


def test_match_when_bounds_are_others_then_no_relu6():
    graph = graph_of(lambda m, x: F.hardtanh(x, 0, 5) + x.clamp(min=0), IMAGE)
    rows = [("relu6", Op(RELU6, Var("x"))), ("tanh", Op(HARDTANH, Var("x")))]
    assert names(find_matches(graph, rows)) == [("tanh", "hardtanh")]


def test_match_when_arguments_are_fixed_then_beats_the_general_form():
    graph = graph_of(lambda m, x: F.hardtanh(x, 0, 6), IMAGE)
    rows = [("tanh", Op(HARDTANH, Var("x"))), ("relu6", Op(RELU6, Var("x")))]
    assert ties(rows) == []
    assert names(find_matches(graph, rows)) == [("relu6", "hardtanh")]
    assert names(find_matches(graph, rows[::-1])) == [("relu6", "hardtanh")]


def test_match_when_arguments_are_defaults_or_keywords_then_read_alike():
    conv = nn.Conv2d(3, 3, 3, padding=1, bias=False)
    graph = graph_of(
        lambda m, x: torch.conv2d(m.conv(x), m.conv.weight, padding=2), IMAGE, conv=conv
    )
    found = find_matches(graph, [("conv", CONV)])
    assert [m["b"] for _, m in found] == [None, None]
    assert [m.arg("conv", "padding") for _, m in found] == [[1, 1], [2, 2]]
    assert [m.arg("conv", "groups") for _, m in found] == [1, 1]


def test_match_when_an_interior_value_has_two_readers_then_none():
    def forward(m, x):
        y = m.conv(x)
        return F.relu(y), y

    graph = graph_of(forward, IMAGE, conv=nn.Conv2d(3, 3, 1))
    assert find_matches(graph, [("a", Op(RELU, CONV))]) == []
    shared = Op(CONV2D, Var("x"), name="conv", users=None)
    assert len(find_matches(graph, [("a", Op(RELU, shared))])) == 1
    two = Op(CONV2D, Var("x"), name="conv", users=2)
    assert len(find_matches(graph, [("a", Op(RELU, two))])) == 1


def test_an_interior_value_when_it_is_an_operand_too_then_not_matched():
    graph = graph_of(lambda m, x: (y := m.conv(x)) + y, IMAGE, conv=nn.Conv2d(3, 3, 1))
    rows = [("sum", op) for op in either_order(ADD, CONV, Var("y"))]
    assert find_matches(graph, rows) == []
    shared = Op(CONV2D, Var("x"), name="conv", users=None)
    assert len(find_matches(graph, [("sum", Op(ADD, shared, Var("y")))])) == 1


def test_match_when_the_anchor_has_many_readers_then_found():
    def forward(m, x):
        y = F.relu(m.conv(x))
        return y + 1, y + 2, y

    graph = graph_of(forward, IMAGE, conv=nn.Conv2d(3, 3, 1))
    assert len(find_matches(graph, [("a", Op(RELU, CONV))])) == 1


def test_match_when_a_name_is_used_twice_then_it_is_one_value():
    silu = either_order(MUL, Var("x"), Op(SIGMOID, Var("x")))
    graph = graph_of(
        lambda m, x, y: (x * x.sigmoid(), x.sigmoid() * x, x * y.sigmoid()), IMAGE, IMAGE + 1
    )
    rows = [("silu", op) for op in silu]
    assert names(find_matches(graph, rows)) == [("silu", "mul"), ("silu", "mul_1")]
    square = graph_of(lambda m, x: (x * x, x * 2), IMAGE)
    assert names(find_matches(square, [("sq", Op(MUL, Var("x"), Var("x")))])) == [("sq", "mul")]


def test_match_when_by_literals_lists_or_predicates_then_only_what_fits():
    graph = graph_of(lambda m, x, y: (torch.cat([x, y], 1), torch.cat([x, x, y])), IMAGE, IMAGE + 1)
    rows = [("channels", Op(CAT, Many("xs"), Lit(1))), ("any", Op(CAT, Many("xs")))]
    found = find_matches(graph, rows)
    assert names(found) == [("channels", "cat"), ("any", "cat_1")]
    assert [n.name for n in found[1][1]["xs"]] == ["x", "x", "y"]
    assert [c.name for _, c in found[1][1].edges("xs")] == ["cat_1"] * 3
    three = Op(CAT, Many("xs"), where=lambda n: len(n.args[0]) == 3)
    assert names(find_matches(graph, [("three", three)])) == [("three", "cat_1")]
    numbers = Var("y", where=lambda v: isinstance(v, int))
    scaled = graph_of(lambda m, x: (x * 2, x * x), IMAGE)
    assert len(find_matches(scaled, [("scale", Op(MUL, Var("x"), numbers))])) == 1


def test_match_when_views_stand_between_then_found_only_if_asked_for():
    graph = graph_of(
        lambda m, x: m.fc(x).transpose(1, 2).relu(), torch.ones(2, 3, 4), fc=nn.Linear(4, 5)
    )
    plain = Op(LINEAR, Var("x"), name="fc")
    assert find_matches(graph, [("a", Op(RELU, plain))]) == []
    through = Op(LINEAR, Var("x"), name="fc", through=PERMUTE)
    [(_, match)] = find_matches(graph, [("a", Op(RELU, through))])
    assert [n.name for n in match.covered] == ["linear", "transpose", "relu"]


def test_match_when_a_call_has_several_results_then_at_the_first():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    graph = torch.export.export(model, (IMAGE,)).run_decompositions({}).module().graph
    conv = Op((aten.conv2d.default, aten.convolution.default), Var("x"), name="conv")
    [(_, match)] = find_matches(graph, [("bn", Op(BATCH_NORM, conv, name="bn"))])
    assert match.anchor.target.__name__ == "getitem"
    assert match.nodes["bn"] is match.anchor.args[0]


def test_match_when_a_constant_is_viewed_then_seen_unless_written():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 3))
            self.register_buffer("cache", torch.zeros(3, 4))

        def forward(self, x):
            self.cache.add_(1)
            a = F.linear(x, self.w)
            b = F.linear(x, self.w.view(3, 4).t().to(torch.float64).float())
            return a, b, F.linear(x, self.cache.t()), F.linear(x, x)

    graph = torch.export.export(Model(), (torch.ones(3, 3),)).module().graph
    found = find_matches(graph, [("fc", Op(LINEAR, Var("x"), Var("w"), Var("b")))])
    assert [m.is_constant("w") for _, m in found] == [True, True, False, False]
    assert all(m.is_constant("b") for _, m in found), "no bias is a constant"


def test_ties_when_two_patterns_fit_one_place_then_named():
    rows = [("a", Op(RELU, CONV)), ("b", Op(RELU, Op(CONV2D, Var("in")))), ("c", Op(RELU6, CONV))]
    assert ties(rows) == [("a", "b")]
    assert ties([("x", Op(CLAMP, Var("x"))), ("y", Op(RELU6, Var("x")))]) == []
    add = either_order(ADD, CONV, Var("y"))
    assert ties([("left", add[0]), ("right", add[1])]) == [], "they cover different convs"
    grouped = Op(CONV2D, where=lambda n: True)
    assert ties([("a", CONV), ("b", grouped)]) == []


def test_match_when_predicates_both_hold_then_refused():
    graph = graph_of(lambda m, x: x.relu(), IMAGE)
    rows = [
        ("a", Op(RELU, where=lambda n: True)),
        ("b", Op(RELU, where=lambda n: len(n.args) == 1)),
    ]
    with pytest.raises(ConfigError, match="two patterns claim the same nodes: 'a' and 'b'"):
        find_matches(graph, rows)


def test_match_when_two_operators_have_one_name_then_refused():
    with pytest.raises(ConfigError, match='the name "a" twice'):
        find_matches(
            graph_of(lambda m, x: x + 1, IMAGE), [("k", Op(RELU, Op(RELU, name="a"), name="a"))]
        )


def test_match_when_a_form_fixes_an_argument_then_read_by_name():
    four = overload(aten.leaky_relu.default, negative_slope=0.25)
    graph = graph_of(lambda m, x: F.leaky_relu(F.leaky_relu(x, 0.25)), IMAGE)
    assert names(find_matches(graph, [("k", Op(four, Var("x")))])) == [("k", "leaky_relu")]


def test_match_when_the_graph_grows_then_tries_grow_with_it_not_with_rows(monkeypatch):
    tries = []
    op = Attempt.op

    def counted(self, pattern, value, *, inside):
        if not inside:
            tries.append(value)
        return op(self, pattern, value, inside=inside)

    monkeypatch.setattr(Attempt, "op", counted)

    def count(layers):
        def forward(m, x):
            for _ in range(layers):
                x = F.relu(m.conv(x))
            return x

        graph = graph_of(forward, IMAGE, conv=nn.Conv2d(3, 3, 1))
        rows = [("chain", row) for row in chain(CONV, maybe(one_of(RELU, RELU6)))]
        rows += [("other", Op(overloads, Var("x"))) for overloads in (CAT, MUL, SIGMOID, LINEAR)]
        tries.clear()
        assert len(find_matches(graph, rows)) == layers
        return len(tries)

    assert count(5) == 5 * 2, "each conv and each relu is tried once, by the row of its operator"
    assert count(20) == 20 * 2


ACTS = {
    "relu": (torch.relu, RELU),
    "relu_": (torch.relu_, RELU),
    "relu6": (F.relu6, RELU6),
    "hardtanh6": (lambda x: F.hardtanh(x, 0.0, 6.0), RELU6),
    "sigmoid": (torch.sigmoid, SIGMOID),
}


@given(
    layers=st.lists(
        st.tuples(st.booleans(), st.sampled_from(["", *sorted(ACTS)]), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    seed=st.randoms(use_true_random=False),
)
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
def test_match_when_the_net_is_random_then_layer_by_layer(layers, seed):
    """Each layer is a linear or a sum, maybe an activation, maybe with a second reader."""

    def forward(m, x):
        extra = []
        for is_linear, act, shared in layers:
            x = m.fc(x) if is_linear else x + 1
            if shared:
                extra.append(x)
            if act:
                x = ACTS[act][0](x.clone() if shared and act.endswith("_") else x)
        return x, extra

    graph = graph_of(forward, torch.ones(2, 4), fc=nn.Linear(4, 4))
    fc = Op(LINEAR, Var("x"), Var("w"), Var("b"), name="first")
    add = Op(ADD, Var("x"), name="first")
    rows = [
        (name, row)
        for name, first in (("linear", fc), ("add", add))
        for row in chain(first, maybe(one_of(RELU, RELU6), "act"))
    ]
    seed.shuffle(rows)
    found = find_matches(graph, rows)
    assert [key for key, _ in found] == ["linear" if layer[0] else "add" for layer in layers]
    for (_, m), (_, act, shared) in zip(found, layers, strict=True):
        fuses = act in ACTS and act != "sigmoid" and not shared
        assert ("act" in m.nodes) == fuses
    covered = [n for _, m in found for n in m.covered]
    assert len(covered) == len(set(covered)), "matches do not overlap"


def test_chain_when_a_step_has_further_arguments_then_matched():
    rows = chain(CONV, step(ADD, "sum", Var("other")), maybe(RELU))
    graph = graph_of(lambda m, x: F.relu(m.conv(x) + x), IMAGE, conv=nn.Conv2d(3, 3, 1))
    [(_, match)] = find_matches(graph, [("res", op) for op in rows])
    assert match["other"].name == "x"
    assert match.anchor.name == "relu"
    with pytest.raises(ConfigError, match='no node is read as "missing"'):
        match.edge("missing")
