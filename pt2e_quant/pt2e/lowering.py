"""Names of torchao.quantization.pt2e.lowering."""

from pt2e_quant.flow.lower_to_x86 import lower_pt2e_quantized_to_x86

__all__ = ["lower_pt2e_quantized_to_x86"]
