"""Slices in the delegate of tensors whose other dimensions are dynamic."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from executorch.backends.xnnpack.operators import node_visitor
from executorch.backends.xnnpack.partition.config.generic_node_configs import SliceCopyConfig
from executorch.backends.xnnpack.utils.utils import PERM_NCHW_TO_NHWC
from torch.export import ExportedProgram

from pt2e_quant.backends.xnnpack.conditions import slices_neighbours

_SLICE = "aten.slice_copy.Tensor"

_WHOLE = 0
"""The size in the payload for which XNNPACK takes all of a dimension, from its start on."""


class AnyBatchSliceConfig(SliceCopyConfig):  # type: ignore[misc]  # executorch ships no types
    """ExecuTorch's setting for slices that also takes them where other dimensions are dynamic.

    ExecuTorch (1.4) asks for fixed sizes everywhere; the slices of a batch, such as the heads of an
    attention, then part its delegates.
    """

    def check_constraints(self, node: torch.fx.Node, ep: ExportedProgram) -> bool:
        """True if the delegate takes a slice."""
        return slices_neighbours(node) and bool(self.check_common_constraints(node, ep))


@contextmanager
def slices_of_any_batch() -> Iterator[None]:
    """While the block runs, slices take all of each dynamic dimension, whatever its size.

    ExecuTorch writes the largest size, and XNNPACK refuses a smaller tensor.
    """
    original = node_visitor._node_visitor_dict[_SLICE]

    class AnyBatchSlice(original):  # type: ignore[misc,valid-type]  # executorch ships no types
        def define_node(self, node: torch.fx.Node, xnn_graph: Any, *others: Any) -> None:
            super().define_node(node, xnn_graph, *others)
            sizes = list(node.meta["val"].shape)
            if "XNN_NHWC_NODE" in node.meta:
                sizes = [sizes[at] for at in PERM_NCHW_TO_NHWC]
            made = xnn_graph.xnodes[-1].xnode_union
            made.sizes = [size if isinstance(size, int) else _WHOLE for size in sizes]

    node_visitor._node_visitor_dict[_SLICE] = AnyBatchSlice
    try:
        yield
    finally:
        node_visitor._node_visitor_dict[_SLICE] = original
