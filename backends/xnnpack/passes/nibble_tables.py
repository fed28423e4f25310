"""Embedding tables of 4-bit integers, two to a byte, and who else reads their bytes.

ExecuTorch's lookup (`embedding_4bit`) finds the even column in a byte's high half, the delegate in
its low half; both keep the integer plus 8. So either reads the other's bytes with each two
neighbouring columns swapped, and the same scales hold where a group is an even number of columns.
"""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.xnnpack.passes.kernel_forms import is_int4, why_no_kernel
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.graph.ops import LINEAR, argument, aten, is_call
from pt2e_quant.graph.rewrite import Editor

OFFSET = 8
"""What is added to an integer before it is stored."""


def pack_nibbles(table: Tensor, *, even_high: bool) -> Tensor:
    """uint8[rows, columns / 2] of int8[rows, columns], whose integers are -8 to 7.

    Args:
        table: the integers; the number of columns is even.
        even_high: the even column of a byte is its high half, as `embedding_4bit` reads it; else
            its low half, as the delegate does.
    """
    shifted = (table + OFFSET).to(torch.uint8)
    even, odd = shifted[:, ::2], shifted[:, 1::2]
    return (even << 4) | odd if even_high else (odd << 4) | even


def delegate_keeps(gm: GraphModule, table: Node) -> bool:
    """Whether a linear of the delegate has a constant for its weight, in 4 bits."""
    constants = gm.graph.find_nodes(op="get_attr", target=table.target)
    weights = [w for c in constants for w in c.users if is_dequantize(w) and is_int4(w)]
    readers = [(w, user) for w in weights for user in w.users if is_call(user, LINEAR)]
    return any(argument(n, "weight") is w and why_no_kernel(gm, n) is None for w, n in readers)


def swap_columns(rows: Node, editor: Editor, *, like: Node) -> Node:
    """Rows [..., columns] with columns 0 and 1 swapped, 2 and 3, and so on.

    An index_select costs a third of a flip of views in ExecuTorch's portable kernels, and takes
    any number of dynamic sizes.
    """
    value = like.meta["val"]
    order = torch.arange(value.shape[-1], dtype=torch.int32) ^ 1
    columns = editor.constant(f"{like.name}_columns", order, like=like)
    return editor.call(aten.index_select.default, rows, -1, columns, like=like, val=value)
