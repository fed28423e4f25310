"""Names of torchao.quantization.pt2e.quantizer.port_metadata_pass."""

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from pt2e_quant.passes.qdq.port_metadata import port_metadata

__all__ = ["PortNodeMetaForQDQ"]


class PortNodeMetaForQDQ(PassBase):
    """Gives each q/dq the stack trace and tag of the annotated operator that it belongs to."""

    def call(self, graph_module: GraphModule) -> PassResult:
        """Edit a graph's metadata in place."""
        return PassResult(graph_module, port_metadata(graph_module))
