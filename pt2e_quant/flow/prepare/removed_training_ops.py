"""Temporarily remove training-only batch norms and dropouts during annotation."""

from dataclasses import dataclass, field

from torch.fx import GraphModule, Node

from pt2e_quant.passes.batch_norm.detach_batch_norm import (
    DetachedNorm,
    attach_batch_norms,
    detach_batch_norms,
)
from pt2e_quant.passes.batch_norm.expanded_conv_bn import expand_conv_bn
from pt2e_quant.passes.cleanup.remove_dropout import (
    DetachedDropout,
    attach_dropouts,
    detach_dropouts,
)


@dataclass(slots=True)
class RemovedTrainingOps:
    """The batch norms and dropouts of one graph.

    Args:
        norms: as they were.
        dropouts: as they were.
        expands: batch norms stay in sight, and those behind convs are written out as operators.
        sources: once the batch norms are back, folded weights and biases with their constants.
    """

    norms: list[DetachedNorm] = field(default_factory=list)
    dropouts: list[DetachedDropout] = field(default_factory=list)
    expands: bool = False
    sources: dict[Node, Node] = field(default_factory=dict)

    def put_norms_back(self, gm: GraphModule) -> None:
        """After annotation: observers go around the batch norms."""
        self.sources = expand_conv_bn(gm) if self.expands else attach_batch_norms(gm, self.norms)

    def put_dropouts_back(self, gm: GraphModule) -> None:
        """After the observers are in: dropout reads what they hand on."""
        attach_dropouts(gm, self.dropouts)


def remove_training_ops(gm: GraphModule, *, expands: bool = False) -> RemovedTrainingOps:
    """Take out every batch norm behind a conv or linear, and every dropout.

    Args:
        gm: the graph module.
        expands: leave the batch norms for a quantizer that annotates them, as torchao's do.
    """
    norms = [] if expands else detach_batch_norms(gm)
    return RemovedTrainingOps(norms=norms, dropouts=detach_dropouts(gm), expands=expands)
