"""Training in low precision: parameters in a format, float8 and int8 products, optimizers."""

from pt2e_quant.training.float8.config import (
    Float8Scaling,
    Float8TrainingConfig,
    GemmInputRole,
    LinearMMConfig,
    ScaledMMConfig,
)
from pt2e_quant.training.float8.linear import convert_to_float8_training, update_float8_scales
from pt2e_quant.training.float8.tensor import Float8Tensor, to_float8
from pt2e_quant.training.int8_linear import Int8TrainingConfig, convert_to_int8_training
from pt2e_quant.training.optimizers.low_bit_optimizers import (
    AdamW4bit,
    AdamW8bit,
    SGD4bit,
    SGD8bit,
    state_bytes,
)
from pt2e_quant.training.optimizers.master_weights import (
    MasterWeightOptimizer,
    with_cpu_offload,
    with_master_weights,
)
from pt2e_quant.training.qat import convert_qat_, prepare_qat_
from pt2e_quant.training.stored_parameters import StoredParameter, quantize_parameters

__all__ = [
    "AdamW4bit",
    "AdamW8bit",
    "Float8Scaling",
    "Float8Tensor",
    "Float8TrainingConfig",
    "GemmInputRole",
    "Int8TrainingConfig",
    "LinearMMConfig",
    "MasterWeightOptimizer",
    "SGD4bit",
    "SGD8bit",
    "ScaledMMConfig",
    "StoredParameter",
    "convert_qat_",
    "convert_to_float8_training",
    "convert_to_int8_training",
    "prepare_qat_",
    "quantize_parameters",
    "state_bytes",
    "to_float8",
    "update_float8_scales",
    "with_cpu_offload",
    "with_master_weights",
]
