"""The Quantizer protocol of PT2E: an object that writes annotations on a graph's nodes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule

from pt2e_quant.core.errors import OverwrittenError
from pt2e_quant.core.specs import Q_ANNOTATION_KEY, EdgeOrNode


class Quantizer(ABC):
    """Writes `node.meta["quantization_annotation"]`; edits nothing else in `annotate`."""

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Rewrite the graph before annotation; by default it stays as it is."""
        return model

    @abstractmethod
    def annotate(self, model: GraphModule) -> GraphModule:
        """Write annotations; returns the same graph."""

    @abstractmethod
    def validate(self, model: GraphModule) -> None:
        """Refuse an annotated graph that the backend cannot run."""

    def prepare_obs_or_fq_callback(
        self,
        model: GraphModule,
        edge_or_node_to_obs_or_fq: dict[EdgeOrNode, nn.Module],
    ) -> None:
        """Called with every group's observer before they go into the graph; may edit the map."""
        return None


class ComposableQuantizer(Quantizer):
    """Several quantizers, one after the other; a later one may not overwrite an earlier one's node.

    Args:
        quantizers: in the order in which they annotate.
    """

    def __init__(self, quantizers: Sequence[Any]) -> None:
        self.quantizers = list(quantizers)

    def for_qat(self) -> "ComposableQuantizer":
        """A copy for training: quantizers that have `for_qat` are replaced by its result."""
        chosen = [getattr(q, "for_qat", lambda same=q: same)() for q in self.quantizers]
        return ComposableQuantizer(chosen)

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Run every quantizer's own rewriting."""
        for quantizer in self.quantizers:
            model = quantizer.transform_for_annotation(model)
        return model

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate with each quantizer in turn.

        Raises:
            OverwrittenError: a quantizer replaced the annotation that an earlier one wrote.
        """
        before: dict[Any, Any] = {}
        for quantizer in self.quantizers:
            quantizer.annotate(model)
            for node in model.graph.nodes:
                found = node.meta.get(Q_ANNOTATION_KEY)
                if node in before and before[node] is not found:
                    raise OverwrittenError(
                        f"{type(quantizer).__name__} replaced an earlier quantizer's annotation",
                        node=node,
                        fix="let each quantizer annotate nodes of its own",
                    )
                if found is not None:
                    before[node] = found
        return model

    def validate(self, model: GraphModule) -> None:
        """Validate with each quantizer."""
        for quantizer in self.quantizers:
            quantizer.validate(model)
