"""onnxscript's rewrite rules, tried only at nodes with the operator that their pattern ends in.

torch.onnx.export tries 46 rules at each node, twice. onnxscript 0.7 prepares a match before it
looks at the node's operator; for a pattern of two outputs (slices that are a split) it even walks
the whole graph first, so that the time grows with the square of the number of nodes. Inside
`rules_at_their_operators` a rule whose pattern ends in another operator fails at once, as it would
have failed later. The file that comes out is the same.
"""

from contextlib import AbstractContextManager
from typing import Any

from onnxscript.rewriter import _basics, _matcher

from pt2e_quant.accelerate.patch import Patch, Replacement, replaced

PATCH = Patch(
    name="onnx_rules",
    saves="a third of the CPU time of lowering 40 attention blocks to ONNX, three quarters of 160",
    versions={"onnxscript": "0.7"},
)


def rules_at_their_operators() -> AbstractContextManager[None]:
    """Skip what cannot match while the block runs; a second thread waits."""
    return replaced(PATCH, _replacements)


def _replacements() -> list[Replacement]:
    whole = _matcher.SimplePatternMatcher.__dict__["match"]

    def match(matcher: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        last = matcher.pattern.output_nodes[0]
        if last.op.matches(node.op_type) and last.domain.matches(node.domain):
            return whole(matcher, model, graph, node, **options)
        return _basics.MatchResult().fail("another operator")

    return [(_matcher.SimplePatternMatcher, "match", match)]
