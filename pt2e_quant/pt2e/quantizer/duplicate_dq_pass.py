"""Names of torchao.quantization.pt2e.quantizer.duplicate_dq_pass."""

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.passes.qdq.port_metadata import is_annotated, is_dynamic, readers_of_values

__all__ = ["DuplicateDQPass"]


class DuplicateDQPass(PassBase):
    """Gives each annotated reader of a static dequantize a copy of its own."""

    def call(self, graph_module: GraphModule) -> PassResult:
        """Edit a graph in place."""
        changed = False
        for node in list(graph_module.graph.nodes):
            if not is_dequantize(node) or is_dynamic(node):
                continue
            readers = readers_of_values(node)
            if len(readers) < 2:
                continue
            for reader in (r for r in readers if is_annotated(r)):
                with graph_module.graph.inserting_after(node):
                    copy = graph_module.graph.node_copy(node)
                reader.replace_input_with(node, copy)
                changed = True
            if not node.users:
                graph_module.graph.erase_node(node)
        if changed:
            graph_module.recompile()
        return PassResult(graph_module, changed)
