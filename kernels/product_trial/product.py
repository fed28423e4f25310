"""One integer product of oneDNN: all that decides which of its kernels runs."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any


class Operator(StrEnum):
    """The operator of torch that computes a product."""

    CONV = "conv"
    LINEAR = "linear"
    INT_MM = "int_mm"


@dataclass(frozen=True, slots=True, kw_only=True)
class PostOpKind:
    """An activation function without its numbers, which choose no kernel.

    Args:
        name: oneDNN's, "none" for nothing.
        algorithm: of gelu.
        bounds: of a clip: the sign of each bound, or an infinity.
    """

    name: str = "none"
    algorithm: str = ""
    bounds: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product of uint8 activations by int8 weights (int8 by int8 for `INT_MM`).

    Args:
        operator: which one.
        x: the activations' shape.
        weight: the weight's, N and then what is summed over.
        stride: one number for each spatial dimension; none of a linear.
        padding: likewise.
        dilation: likewise.
        groups: of channels.
        is_shifted: whether the activations' zero_point is not 0.
        is_packed_for_x: whether the weight is packed for this shape of x, or for any.
        has_bias: whether there is one.
        result: "uint8" or "float32".
        is_result_shifted: whether the result's zero_point is not 0.
        summand: dtype of what is added, "" for nothing.
        is_summand_shifted: whether the summand's zero_point is not 0.
        post_op: the function behind it.
    """

    operator: Operator
    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    is_shifted: bool = False
    is_packed_for_x: bool = False
    has_bias: bool = False
    result: str = "float32"
    is_result_shifted: bool = False
    summand: str = ""
    is_summand_shifted: bool = False
    post_op: PostOpKind = PostOpKind()

    @property
    def key(self) -> str:
        """Text that is equal for equal products, and that `read_product` reads."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to multiply."""
        return 0 in self.x or 0 in self.weight

    def at(self, x: tuple[int, ...]) -> "Product":
        """The product with activations of another shape."""
        return replace(self, x=x)

    @property
    def elements(self) -> int:
        """The number of activations."""
        return math.prod(self.x)


def read_product(key: str) -> Product:
    """The product of a key.

    Raises:
        ValueError: the text is not one.
    """
    found: Any = json.loads(key)
    if not isinstance(found, Mapping):
        raise ValueError(f"{key!r} is no product")
    post_op: Any = found["post_op"]
    lists = ("x", "weight", "stride", "padding", "dilation")
    fixed = {name: tuple(found[name]) for name in lists}
    kind = replace(PostOpKind(**post_op), bounds=tuple(post_op["bounds"]))
    return Product(**{**found, **fixed, "post_op": kind, "operator": Operator(found["operator"])})
