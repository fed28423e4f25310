"""A Quantizer of embedding tables alone: uint8 rows with a real zero_point each."""

from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn import functional

from pt2e_quant.core.specs import Q_ANNOTATION_KEY, QuantizationAnnotation, QuantizationSpec
from pt2e_quant.flow.annotate.quantizer import Quantizer
from pt2e_quant.observers.static.minmax import PerChannelMinMaxObserver
from pt2e_quant.pt2e.quantizer.utils import (
    OperatorConfig,
    OperatorPatternType,
    QuantizationConfig,
)

__all__ = ["EmbeddingQuantizer", "get_embedding_operators_config"]


def get_embedding_operators_config() -> OperatorConfig:
    """The one config there is, and the operators that have it."""
    weight = QuantizationSpec(
        dtype=torch.uint8,
        qscheme=torch.per_channel_affine_float_qparams,
        ch_axis=0,
        observer_or_fake_quant_ctr=PerChannelMinMaxObserver.with_args(eps=2**-12),
    )
    return OperatorConfig(
        config=QuantizationConfig(None, None, weight, None),
        operators=[[nn.Embedding], [functional.embedding]],
    )


class EmbeddingQuantizer(Quantizer):
    """Annotates the table of every embedding."""

    @classmethod
    def get_supported_operators(cls) -> list[OperatorConfig]:
        """Every config with its operators."""
        return [get_embedding_operators_config()]

    @classmethod
    def get_supported_quantization_configs(cls) -> list[QuantizationConfig]:
        """Every config."""
        return [config for config, _ in cls.get_supported_operators()]

    @classmethod
    def get_supported_operator_for_quantization_config(
        cls, quantization_config: Any
    ) -> list[OperatorPatternType]:
        """The operators that can have a config."""
        weight = getattr(quantization_config, "weight", None)
        for config, operators in cls.get_supported_operators():
            if weight is not None and weight.qscheme == getattr(config.weight, "qscheme", None):
                return operators
        return []

    def annotate(self, model: GraphModule) -> GraphModule:
        """Annotate the tables."""
        spec = get_embedding_operators_config().config.weight
        for node in model.graph.nodes:
            if node.target == torch.ops.aten.embedding.default:
                node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
                    input_qspec_map={node.args[0]: spec}
                )
        return model

    def validate(self, model: GraphModule) -> None:
        """Every annotation of this quantizer is valid."""
