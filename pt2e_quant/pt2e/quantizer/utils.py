"""Names of torchao.quantization.pt2e.quantizer.utils: reading configs, writing annotations."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.specs import (
    Q_ANNOTATION_KEY,
    QuantizationAnnotation,
    QuantizationSpec,
    is_valid_annotation,
)

__all__ = [
    "OperatorConfig",
    "OperatorPatternType",
    "QuantizationConfig",
    "annotate_input_qspec_map",
    "annotate_output_qspec",
    "get_bias_qspec",
    "get_input_act_qspec",
    "get_module_name_filter",
    "get_output_act_qspec",
    "get_weight_qspec",
    "is_valid_annotation",
]

OperatorPatternType = list[Callable[..., Any]]
"""A chain of module classes or functions."""


@dataclass(frozen=True)
class QuantizationConfig:
    """The specs of an operator's tensors; None leaves one in float."""

    input_activation: QuantizationSpec | None
    output_activation: QuantizationSpec | None
    weight: QuantizationSpec | None
    bias: QuantizationSpec | None
    is_qat: bool = False


class OperatorConfig(NamedTuple):
    """A config and the operators that can have it."""

    config: QuantizationConfig
    operators: list[OperatorPatternType]


def get_input_act_qspec(quantization_config: QuantizationConfig | None) -> QuantizationSpec | None:
    """The spec of inputs.

    Raises:
        ConfigError: it is not per tensor.
    """
    return _activation(
        None if quantization_config is None else quantization_config.input_activation
    )


def get_output_act_qspec(
    quantization_config: QuantizationConfig | None,
) -> QuantizationSpec | None:
    """The spec of outputs.

    Raises:
        ConfigError: it is not per tensor.
    """
    return _activation(
        None if quantization_config is None else quantization_config.output_activation
    )


def get_weight_qspec(quantization_config: QuantizationConfig | None) -> QuantizationSpec | None:
    """The spec of weights.

    Raises:
        ConfigError: it is not symmetric.
    """
    spec = None if quantization_config is None else quantization_config.weight
    allowed = (torch.per_tensor_symmetric, torch.per_channel_symmetric, None)
    if spec is not None and spec.qscheme not in allowed:
        raise ConfigError(f"weights must be symmetric, found {spec}")
    return spec


def get_bias_qspec(quantization_config: QuantizationConfig | None) -> QuantizationSpec | None:
    """The spec of biases.

    Raises:
        ConfigError: it is not float.
    """
    spec = None if quantization_config is None else quantization_config.bias
    if spec is not None and spec.dtype != torch.float:
        raise ConfigError(f"a bias must stay float, found {spec}")
    return spec


def _activation(spec: QuantizationSpec | None) -> QuantizationSpec | None:
    allowed = (torch.per_tensor_affine, torch.per_tensor_symmetric)
    if spec is not None and spec.qscheme not in allowed:
        raise ConfigError(f"activations must be per tensor, found {spec}")
    return spec


def annotate_input_qspec_map(node: Node, input_node: Node, qspec: Any) -> None:
    """Set the spec of one input of a node, next to what it already has."""
    annotation = node.meta.setdefault(Q_ANNOTATION_KEY, QuantizationAnnotation())
    if annotation.input_qspec_map is None:
        annotation.input_qspec_map = {}
    annotation.input_qspec_map[input_node] = qspec


def annotate_output_qspec(node: Node, qspec: Any) -> None:
    """Set the spec of a node's output, next to what it already has."""
    annotation = node.meta.setdefault(Q_ANNOTATION_KEY, QuantizationAnnotation())
    annotation.output_qspec = qspec


def get_module_name_filter(module_name: str) -> Callable[[Node], bool]:
    """A predicate: was a node traced in the module of that dotted name, or in one within it."""

    def module_name_filter(n: Node) -> bool:
        stack = n.meta.get("nn_module_stack") or {}
        return module_name in [str(path).removeprefix("L['self'].") for path, _ in stack.values()]

    return module_name_filter
