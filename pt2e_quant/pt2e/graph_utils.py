"""Names of torchao.quantization.pt2e.graph_utils."""

from pt2e_quant.graph.partitions import (
    bfs_trace_with_node_process,
    collect_producer_nodes,
    find_sequential_partitions,
    get_equivalent_types,
    update_equivalent_types_dict,
)

__all__ = [
    "bfs_trace_with_node_process",
    "collect_producer_nodes",
    "find_sequential_partitions",
    "get_equivalent_types",
    "update_equivalent_types_dict",
]
