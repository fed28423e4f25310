"""onnxscript's rules tried at the operators that they end in: the same files, rule for rule."""

import onnx_ir as ir
import pytest
import torch
from onnxscript import rewriter
from onnxscript.rewriter import _matcher
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.accelerate.onnx_rules import PATCH, rules_at_their_operators
from pt2e_quant.accelerate.patch import VARIABLE

pytestmark = pytest.mark.skipif(not PATCH.is_on(), reason="other versions: nothing is replaced")

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
REWRITTEN = {
    "casts": ("float[4,6] x", "a = Cast<to=1>(x)\n y = Relu(a)"),
    "transposes": ("float[4,6] x", "a = Transpose<perm=[1,0]>(x)\n y = Transpose<perm=[1,0]>(a)"),
    "clips": ("float[4,6] x", "a = Relu(x)\n y = Relu(a)"),
    "none": ("float[4,6] x", "a = Sin(x)\n y = Exp(a)"),
    "another_domain": ("float[4,6] x", "a = Sin(x)\n y = Exp(a)"),
}


class Halves(nn.Module):
    """Slices that are a split, which is a pattern of two outputs, and layers around them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(torch.relu(self.conv(x)).mean((2, 3)))
        return torch.cat([-x[:, 3:], x[:, :3]], 1).permute(1, 0).permute(1, 0)


def test_rules_when_switched_off_then_the_file_is_the_same(monkeypatch):
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 8, 8),)
    backend = pq.backends.get("onnx")
    prepared = pq.prepare_pt2e(torch.export.export(Halves().eval(), inputs), backend.quantizer())
    prepared(*inputs)
    canonical = pq.convert_pt2e(prepared)
    first = backend.lower(canonical, verify=False).model
    monkeypatch.setenv(VARIABLE, PATCH.name)
    assert backend.lower(canonical, verify=False).model == first


def rewritten(name: str) -> tuple[list[str], int]:
    """The operators that all default rules leave, and how many of the rules were applied."""
    sizes, body = REWRITTEN[name]
    model = ir.from_onnx_text(f"{HEADER} g ({sizes}) => (float[4,6] y) {{ {body} }}")
    if name == "another_domain":
        model.graph[0].domain = "com.microsoft"
    rules = rewriter.RewriteRuleSet(rewriter._DEFAULT_REWRITE_RULES)
    return [node.op_type for node in model.graph], rules.apply_to_model(model)


@pytest.mark.parametrize("name", REWRITTEN)
def test_rules_when_tried_at_their_operators_then_the_same_are_applied(name):
    before = rewritten(name)
    with rules_at_their_operators():
        assert rewritten(name) == before
    assert before[1] > 0 or name in ("none", "another_domain")


def test_rules_when_left_then_nothing_is_replaced():
    before = _matcher.SimplePatternMatcher.__dict__["match"]
    with pytest.raises(ZeroDivisionError), rules_at_their_operators():
        _ = _matcher.SimplePatternMatcher.__dict__["match"] is before or 1 / 0
    assert _matcher.SimplePatternMatcher.__dict__["match"] is before


def test_rules_when_operators_differ_then_no_rule_walks_the_graph(monkeypatch):
    """The walk over all nodes, once for each, made the time grow with their square."""
    walks = []
    whole = _matcher.SimplePatternMatcher.__dict__["match"]

    def counted(matcher, model, graph, node, **options):
        walks.append(node.op_type)
        return whole(matcher, model, graph, node, **options)

    monkeypatch.setattr(_matcher.SimplePatternMatcher, "match", counted)
    with rules_at_their_operators():
        rewritten("none")
    assert not walks
