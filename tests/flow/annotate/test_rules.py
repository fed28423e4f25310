"""Rules: what they select, which one wins, and names that match nothing."""

import pytest
import torch
from torch import nn
from torch.export import export

from pt2e_quant.core.errors import AnnotationError, ConfigError
from pt2e_quant.core.schemes import INT8_ACTIVATION, INT8_WEIGHT, Role, Scheme
from pt2e_quant.flow.annotate.rules import QuantRule, RuleBook, RuleKind

INT8 = Scheme(name="int8", input=INT8_ACTIVATION, output=INT8_ACTIVATION, weight=INT8_WEIGHT)
GLOBAL = QuantRule(kind=RuleKind.GLOBAL, scheme=INT8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        self.head = nn.Linear(2, 2)

    def forward(self, x):
        return self.head(self.layers(x))


@pytest.fixture(scope="module")
def nodes():
    gm = export(Net(), (torch.randn(1, 2),)).module()
    return [n for n in gm.graph.nodes if n.op == "call_function"]


def _schemes(nodes, *rules):
    book = RuleBook([GLOBAL, *rules])
    return [scheme.name if (scheme := book.scheme_for(n)) else None for n in nodes]


def _deny(kind, pattern):
    return QuantRule(kind=kind, pattern=pattern, scheme=None)


@pytest.mark.parametrize(
    ("kind", "pattern", "floats"),
    [
        (RuleKind.MODULE_NAME, "head", {3}),
        (RuleKind.MODULE_NAME, "layers", {0, 1, 2}),
        (RuleKind.MODULE_NAME, "layers.?", {0, 1, 2}),
        (RuleKind.MODULE_NAME, r"re:layers\.[02]", {0, 2}),
        (RuleKind.MODULE_TYPE, "torch.nn.modules.linear.Linear", {0, 2, 3}),
        (RuleKind.MODULE_TYPE, "Linear", {0, 2, 3}),
        (RuleKind.OPERATOR, "aten.tanh", {1}),
        (RuleKind.OPERATOR, "tanh", {1}),
        (RuleKind.OPERATOR, "aten.tanh.default", {1}),
        (RuleKind.NODE, "linear_1", {2}),
        (RuleKind.NODE, "linear*", {0, 2, 3}),
    ],
)
def test_rule_when_a_pattern_is_given_then_selects_its_nodes(nodes, kind, pattern, floats):
    found = _schemes(nodes, _deny(kind, pattern))
    assert {i for i, name in enumerate(found) if name is None} == floats


def test_rules_when_kinds_differ_then_the_more_specific_wins(nodes):
    allow = QuantRule(kind=RuleKind.MODULE_NAME, pattern="layers.0", scheme=INT8)
    deny = _deny(RuleKind.OPERATOR, "linear")
    for rules in ((allow, deny), (deny, allow)):
        assert _schemes(nodes, *rules) == ["int8", "int8", None, None]


def test_rules_when_of_one_kind_then_the_later_wins(nodes):
    deny = _deny(RuleKind.MODULE_NAME, "layers")
    allow = QuantRule(kind=RuleKind.MODULE_NAME, pattern="layers.0", scheme=INT8)
    assert _schemes(nodes, deny, allow)[0] == "int8"
    assert _schemes(nodes, allow, deny)[0] is None


def test_rule_when_for_one_role_then_the_others_stay(nodes):
    rule = QuantRule(
        kind=RuleKind.MODULE_NAME, pattern="head", scheme=None, roles=frozenset({Role.OUTPUT})
    )
    scheme = RuleBook([GLOBAL, rule]).scheme_for(nodes[3])
    assert scheme.output is None
    assert (scheme.input, scheme.weight) == (INT8_ACTIVATION, INT8_WEIGHT)


def test_rule_when_it_selects_nothing_then_near_names_are_offered(nodes):
    book = RuleBook([GLOBAL, _deny(RuleKind.MODULE_NAME, "haed")])
    with pytest.raises(AnnotationError, match='matches "haed": did you mean "head"'):
        book.check_all_matched(nodes)


def test_rule_when_its_regular_expression_is_bad_then_refused():
    with pytest.raises(ConfigError, match="bad regular expression"):
        _deny(RuleKind.NODE, "re:(")


def test_rule_when_it_has_a_condition_then_selects_where_it_holds(nodes):
    def is_last_linear(node):
        return node.name == "linear_2"

    rule = QuantRule(kind=RuleKind.GLOBAL, scheme=None, where=is_last_linear)
    assert _schemes(nodes, rule) == ["int8", "int8", "int8", None]
    assert str(rule) == "global is_last_linear -> float"
    RuleBook([rule]).check_all_matched(nodes[:1])
