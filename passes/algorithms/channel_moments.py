"""Mean and variance of each channel of a tensor, estimated from the weights before it.

No data and no run: `moment_rules` says what operators make of them, starting at norms. That is
rough, and good enough to tell which channels are large: an estimate may only steer a choice that
is exact in float whatever it is.
"""

from torch.fx import GraphModule, Node

from pt2e_quant.graph.idioms.rms_norm import find_roots
from pt2e_quant.passes.algorithms.moment_rules import Moments, rule_of

__all__ = ["ChannelMoments"]


class ChannelMoments:
    """The moments of a graph's tensors along their last axis, each computed when first asked for.

    Args:
        gm: its constants must stay as they are while this is asked.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.roots = find_roots(gm.graph)
        self._found: dict[Node, Moments | None] = {}

    def of(self, node: Node) -> Moments | None:
        """The moments of a node's value, None if nothing is known of it."""
        stack = [node]  # not recursion: a residual stream is as deep as the model
        while stack:
            top = stack[-1]
            if top in self._found or (source := self._missing(top)) is None:
                stack.pop()
            else:
                stack.append(source)
        return self._found[node]

    def _missing(self, node: Node) -> Node | None:
        """A node to look at first; None when this one's moments were found."""
        rule = rule_of(node, self.roots)
        sources = None if rule is None else rule.reads(node)
        if rule is None or sources is None:
            self._found[node] = None
            return None
        for source in sources:
            if source not in self._found:
                return source
            if self._found[source] is None and not rule.is_norm:
                self._found[node] = None
                return None
        self._found[node] = rule.compute(self.gm, node, [self._found[s] for s in sources])
        return None
