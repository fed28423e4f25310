"""Quantization specs and annotations: the PT2E protocol between a Quantizer and prepare.

Names, field order and defaults are those of torchao's PT2E, so that a script or a vendor's
Quantizer written against it changes an import and nothing else. Specs from elsewhere are
read by structure (`kind_of`), never by class.
"""

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from pt2e_quant.core.schemes import TensorScheme

Q_ANNOTATION_KEY = "quantization_annotation"
"""The key of `node.meta` that holds a node's annotation."""

EdgeOrNode = tuple[Node, Node] | Node
"""An input edge (producer, consumer), or a node standing for its output."""


class QuantizationSpecBase(ABC):  # noqa: B024  (the protocol's own base: it has no methods)
    """The requested quantization of one tensor of the graph."""


@dataclass(frozen=True)
class QuantizationSpec(QuantizationSpecBase):
    """A tensor with an observer (or fake-quantize) of its own.

    Args:
        dtype: the integer type, for example torch.int8.
        observer_or_fake_quant_ctr: makes the observer; takes the other fields as keywords.
        quant_min: smallest integer used; the type's own by default.
        quant_max: largest integer used; the type's own by default.
        qscheme: per_tensor/per_channel, affine/symmetric, as torch names them.
        ch_axis: the channel axis where the scheme is per channel.
        is_dynamic: choose qparams at run time from the tensor itself.

    Raises:
        ValueError: quant_min is above quant_max, or ch_axis is negative.
    """

    dtype: torch.dtype
    observer_or_fake_quant_ctr: Any
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None
    ch_axis: int | None = None
    is_dynamic: bool = False

    def __post_init__(self) -> None:
        _check_range(self.quant_min, self.quant_max)
        if self.ch_axis is not None and self.ch_axis < 0:
            raise ValueError(f"ch_axis must be >= 0, found {self.ch_axis}")


@dataclass(frozen=True)
class BlockQuantizationSpec(QuantizationSpecBase):
    """A tensor with an observer of its own, under a scheme that torch's qschemes cannot say.

    Args:
        dtype: that of the scheme's codes.
        observer_or_fake_quant_ctr: makes the observer; takes the other fields as keywords.
        scheme: the scheme.
        is_dynamic: scales are found at run time.
    """

    dtype: torch.dtype
    observer_or_fake_quant_ctr: Any
    scheme: TensorScheme
    is_dynamic: bool = False


@dataclass(frozen=True)
class FixedQParamsQuantizationSpec(QuantizationSpecBase):
    """A tensor whose qparams are known beforehand, for example a softmax output.

    Raises:
        ValueError: quant_min is above quant_max.
    """

    dtype: torch.dtype
    scale: float
    zero_point: int
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None
    is_dynamic: bool = False

    def __post_init__(self) -> None:
        _check_range(self.quant_min, self.quant_max)


@dataclass(frozen=True)
class SharedQuantizationSpec(QuantizationSpecBase):
    """A tensor that has the qparams of another edge or node."""

    edge_or_node: EdgeOrNode


@dataclass(frozen=True)
class DerivedQuantizationSpec(QuantizationSpecBase):
    """A tensor whose qparams are computed from those of others, for example an int32 bias.

    Args:
        derived_from: the edges or nodes whose observers are handed to `derive_qparams_fn`.
        derive_qparams_fn: takes their observers, returns (scale, zero_point).
        dtype: the integer type.
        quant_min: smallest integer used; the type's own by default.
        quant_max: largest integer used; the type's own by default.
        qscheme: per_tensor/per_channel, affine/symmetric, as torch names them.
        ch_axis: the channel axis where the scheme is per channel.
        is_dynamic: choose qparams at run time.
    """

    derived_from: list[EdgeOrNode]
    derive_qparams_fn: Callable[[list[nn.Module]], tuple[Tensor, Tensor]]
    dtype: torch.dtype
    quant_min: int | None = None
    quant_max: int | None = None
    qscheme: torch.qscheme | None = None
    ch_axis: int | None = None
    is_dynamic: bool = False

    def __post_init__(self) -> None:
        _check_range(self.quant_min, self.quant_max)


@dataclass
class QuantizationAnnotation:
    """The request of a Quantizer for one node.

    Args:
        input_qspec_map: input node to its spec; an input that is absent stays float.
        output_qspec: the spec of the node's output; None leaves it float.
        allow_implicit_sharing: let equal specs on one tensor share one observer.
    """

    input_qspec_map: dict[Node, QuantizationSpecBase | None] = field(default_factory=dict)
    output_qspec: QuantizationSpecBase | None = None
    allow_implicit_sharing: bool = True
    _annotated: bool = False


class SpecKind(StrEnum):
    """The four ways a tensor gets its qparams."""

    OBSERVED = "observed"
    FIXED = "fixed"
    SHARED = "shared"
    DERIVED = "derived"


def kind_of(spec: object) -> SpecKind | None:
    """Return the kind of a spec, by its fields; None if the object is no spec."""
    if hasattr(spec, "edge_or_node"):
        return SpecKind.SHARED
    if hasattr(spec, "derived_from"):
        return SpecKind.DERIVED
    if hasattr(spec, "observer_or_fake_quant_ctr"):
        return SpecKind.OBSERVED
    if hasattr(spec, "scale") and hasattr(spec, "zero_point"):
        return SpecKind.FIXED
    return None


def _check_range(quant_min: int | None, quant_max: int | None) -> None:
    if quant_min is not None and quant_max is not None and quant_min > quant_max:
        raise ValueError(f"quant_min must be <= quant_max, found {quant_min} > {quant_max}")


def is_valid_annotation(annotation: Any) -> bool:
    """True if an annotation asks for anything."""
    if annotation is None:
        return False
    return bool(annotation.input_qspec_map) or annotation.output_qspec is not None
