"""q/dq in torchao's own operators, for granularities that quantized_decomposed cannot say.

The operators are torchao's: they are looked up there, never defined here.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.dtypes import DTYPES
from pt2e_quant.core.errors import MissingExtraError

__all__ = ["insert_affine_qdq"]


def insert_affine_qdq(
    model: GraphModule,
    node: Node,
    observer: Any,
    qparams: tuple[Tensor, Tensor | None] | None,
) -> None:
    """Replace an observer's node by quantize_affine and dequantize_affine.

    Args:
        model: owns the graph and will own the qparams.
        node: calls the observer; it is erased.
        observer: says dtype, range, blocks and mapping.
        qparams: scale and zero_point of each block; None chooses them at run time.

    Raises:
        MissingExtraError: torchao is not installed.
    """
    ops = _operators()
    source = node.args[0]
    assert isinstance(source, Node)
    insert = _Inserter(model, node)
    limits = (observer.target_dtype, observer.quant_min, observer.quant_max)
    value = node.meta.get("val")
    block = observer.block_size
    with model.graph.inserting_before(node):
        if qparams is None:
            asked = (source, observer.mapping_type.name, block, *limits, observer.eps)
            dtypes = observer.scale_dtype, observer.zero_point_dtype
            both = tuple(_like_blocks(value, block, dtype) for dtype in dtypes)
            choose = insert.call(ops.choose_qparams_affine, (*asked, *dtypes), both)
            scale = insert.call(operator.getitem, (choose, 0), both[0])
            zero_point: Node | None = insert.call(operator.getitem, (choose, 1), both[1])
        else:
            name = _free_name(model, source)
            scale = insert.constant(f"{name}_scale", qparams[0])
            held = qparams[1]
            zero_point = None if held is None else insert.constant(f"{name}_zero_point", held)
        arguments = (block, scale, zero_point, *limits)
        integers = None if value is None else value.to(_storage(observer.target_dtype))
        quantized = insert.call(ops.quantize_affine, (source, *arguments), integers)
        made = insert.call(ops.dequantize_affine, (quantized, *arguments), value)
        made.kwargs = {"output_dtype": observer.original_dtype}
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    model.graph.erase_node(node)


class _Inserter:
    """Adds nodes that carry the trace of an observer's node, and a fake value if it has one."""

    def __init__(self, model: GraphModule, like: Node) -> None:
        self.model = model
        self.meta = {k: v for k, v in like.meta.items() if k != "val"}
        self.like = like.meta.get("val")

    def call(self, target: Any, arguments: tuple[Any, ...], value: Any) -> Node:
        """Add a call whose value is known."""
        return self._with(self.model.graph.call_function(target, arguments), value)

    def constant(self, name: str, tensor: Tensor) -> Node:
        """Register a buffer under a dotted name; returns the node that reads it."""
        owner, _, leaf = name.rpartition(".")
        self.model.get_submodule(owner).register_buffer(leaf, tensor.detach().clone())
        made = None
        if isinstance(self.like, Tensor):
            made = self.like.new_empty(tensor.shape, dtype=tensor.dtype)
        return self._with(self.model.graph.get_attr(name), made)

    def _with(self, node: Node, value: Any) -> Node:
        node.meta.update(self.meta)
        if value is not None:
            node.meta["val"] = value
        return node


def _like_blocks(value: Tensor | None, block: Sequence[int], dtype: torch.dtype | None) -> Any:
    """The fake qparams of a fake tensor: one for each block."""
    if value is None:
        return None
    shape = [size // part for size, part in zip(value.shape, block, strict=True)]
    return value.new_empty(shape, dtype=dtype or torch.float32)


def _storage(dtype: torch.dtype) -> torch.dtype:
    return DTYPES[dtype].storage if dtype in DTYPES else dtype


def _operators() -> Any:
    try:
        import torchao.quantization.quant_primitives  # noqa: F401  # registers the operators
    except ImportError as error:
        raise MissingExtraError("xnnpack", "torchao") from error
    return torch.ops.torchao


def _free_name(model: GraphModule, source: Node) -> str:
    """What the qparams of a node are named after: its parameter, else the node itself."""
    base = str(source.target) if source.op == "get_attr" else source.name
    owner, _, leaf = base.rpartition(".")
    module = model.get_submodule(owner)
    name, count = leaf, 1
    while hasattr(module, f"{name}_scale") or hasattr(module, f"{name}_zero_point"):
        name, count = f"{leaf}_{count}", count + 1
    return f"{owner}.{name}" if owner else name
