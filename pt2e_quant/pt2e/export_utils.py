"""Names of torchao.quantization.pt2e.export_utils."""

from pt2e_quant.flow.train_mode import model_is_exported
from pt2e_quant.flow.wrapper_module import WrapperModule

__all__ = ["WrapperModule", "model_is_exported"]
