"""Quantizers, specs and annotation helpers under torchao's names."""

from pt2e_quant.core.specs import (
    DerivedQuantizationSpec,
    EdgeOrNode,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    QuantizationSpecBase,
    SharedQuantizationSpec,
)
from pt2e_quant.flow.annotate.quantizer import ComposableQuantizer, Quantizer
from pt2e_quant.pt2e.quantizer.duplicate_dq_pass import DuplicateDQPass
from pt2e_quant.pt2e.quantizer.port_metadata_pass import PortNodeMetaForQDQ
from pt2e_quant.pt2e.quantizer.utils import (
    OperatorConfig,
    OperatorPatternType,
    QuantizationConfig,
    annotate_input_qspec_map,
    annotate_output_qspec,
    get_bias_qspec,
    get_input_act_qspec,
    get_module_name_filter,
    get_output_act_qspec,
    get_weight_qspec,
    is_valid_annotation,
)

__all__ = [
    "ComposableQuantizer",
    "DerivedQuantizationSpec",
    "DuplicateDQPass",
    "EdgeOrNode",
    "FixedQParamsQuantizationSpec",
    "OperatorConfig",
    "OperatorPatternType",
    "PortNodeMetaForQDQ",
    "QuantizationAnnotation",
    "QuantizationConfig",
    "QuantizationSpec",
    "QuantizationSpecBase",
    "Quantizer",
    "SharedQuantizationSpec",
    "annotate_input_qspec_map",
    "annotate_output_qspec",
    "get_bias_qspec",
    "get_input_act_qspec",
    "get_module_name_filter",
    "get_output_act_qspec",
    "get_weight_qspec",
    "is_valid_annotation",
]
