"""Names of torchao.quantization.pt2e.quantize_pt2e."""

from pt2e_quant.flow.drop_in import convert_pt2e, prepare_pt2e, prepare_qat_pt2e

__all__ = ["convert_pt2e", "prepare_pt2e", "prepare_qat_pt2e"]
