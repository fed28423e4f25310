"""The numbers of a convolution in a graph: one for each spatial axis, padding without names."""

from typing import Any

from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.op_table import Constraint
from pt2e_quant.graph.ops import argument

__all__ = ["EVEN_PADDING", "even_padding", "per_axis", "weight_of"]


def weight_of(conv: Node) -> Tensor:
    """The fake value of the weight: [O, C / groups, *kernel]."""
    weight: Any = argument(conv, "weight")
    found: Tensor = weight.meta["val"]
    return found


def per_axis(conv: Node, name: str) -> list[int]:
    """Stride or dilation with a number for each spatial axis."""
    given = argument(conv, name)
    numbers = [given] if isinstance(given, int) else list(given)
    return numbers * (weight_of(conv).dim() - 2) if len(numbers) == 1 else numbers


def even_padding(conv: Node) -> list[int] | None:
    """Padding with a number for each spatial axis, None where "same" pads unevenly."""
    padding = argument(conv, "padding")
    if not isinstance(padding, str):
        return per_axis(conv, "padding")
    kernel = weight_of(conv).shape[2:]
    if padding == "valid":
        return [0] * len(kernel)
    spans = [d * (k - 1) for d, k in zip(per_axis(conv, "dilation"), kernel, strict=True)]
    return None if any(span % 2 for span in spans) else [span // 2 for span in spans]


EVEN_PADDING = Constraint(
    text="padding that is the same on both sides",
    holds=lambda match: even_padding(match.nodes["op"]) is not None,
)
