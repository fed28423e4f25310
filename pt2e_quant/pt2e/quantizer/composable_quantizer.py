"""Names of torchao.quantization.pt2e.quantizer.composable_quantizer."""

from pt2e_quant.flow.annotate.quantizer import ComposableQuantizer

__all__ = ["ComposableQuantizer"]
