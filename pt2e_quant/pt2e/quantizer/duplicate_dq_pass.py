"""Names of torchao.quantization.pt2e.quantizer.duplicate_dq_pass."""

from pt2e_quant.flow.fx_passes import DuplicateDQPass

__all__ = ["DuplicateDQPass"]
