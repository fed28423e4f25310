"""Names of torchao.quantization.pt2e.quantizer.utils."""

from pt2e_quant.flow.annotation_helpers import (
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
