"""q/dq in torchao's own operators, for granularities that quantized_decomposed cannot say.

The operators are torchao's: they are looked up there, never defined here.
"""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

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
    limits = (observer.target_dtype, observer.quant_min, observer.quant_max)
    with model.graph.inserting_before(node):
        if qparams is None:
            choose = model.graph.call_function(
                ops.choose_qparams_affine,
                (source, observer.mapping_type.name, observer.block_size, *limits,
                 observer.eps, observer.scale_dtype, observer.zero_point_dtype),
            )  # fmt: skip
            scale = model.graph.call_function(operator.getitem, (choose, 0))
            zero_point: Node | None = model.graph.call_function(operator.getitem, (choose, 1))
        else:
            name = _free_name(model, f"{node.target}_affine")
            scale = _constant(model, f"{name}_scale", qparams[0])
            zero_point = (
                None if qparams[1] is None else _constant(model, f"{name}_zero_point", qparams[1])
            )
        arguments = (observer.block_size, scale, zero_point, *limits)
        quantized = model.graph.call_function(ops.quantize_affine, (source, *arguments))
        made = model.graph.call_function(
            ops.dequantize_affine,
            (quantized, *arguments),
            {"output_dtype": observer.original_dtype},
        )
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    model.graph.erase_node(node)


def _operators() -> Any:
    try:
        import torchao.quantization.quant_primitives  # noqa: F401  # registers the operators
    except ImportError as error:
        raise MissingExtraError("xnnpack", "torchao") from error
    return torch.ops.torchao


def _free_name(model: GraphModule, wish: str) -> str:
    """A name under which the model has no attributes yet."""
    base = wish.replace(".", "_")
    name, count = base, 1
    while hasattr(model, f"{name}_scale") or hasattr(model, f"{name}_zero_point"):
        name, count = f"{base}_{count}", count + 1
    return name


def _constant(model: GraphModule, name: str, value: Tensor) -> Node:
    model.register_buffer(name, value.detach().clone())
    return model.graph.get_attr(name)
