"""Names of torchao.quantization.pt2e.utils."""

from pt2e_quant.flow.example_inputs import get_fqn_to_example_inputs
from pt2e_quant.graph.attributes import (
    create_getattr_from_value,
    get_new_attr_name_with_prefix,
    getattr_from_fqn,
    has_no_children_ignoring_parametrizations,
)
from pt2e_quant.observers.qparam_checks import (
    calculate_qmin_qmax,
    check_min_max_valid,
    determine_qparams,
    get_qparam_dict,
    to_underlying_dtype,
    validate_qmin_qmax,
)
from pt2e_quant.observers.qschemes import is_per_channel, is_per_tensor

__all__ = [
    "calculate_qmin_qmax",
    "check_min_max_valid",
    "create_getattr_from_value",
    "determine_qparams",
    "get_fqn_to_example_inputs",
    "get_new_attr_name_with_prefix",
    "get_qparam_dict",
    "getattr_from_fqn",
    "has_no_children_ignoring_parametrizations",
    "is_per_channel",
    "is_per_tensor",
    "to_underlying_dtype",
    "validate_qmin_qmax",
]
