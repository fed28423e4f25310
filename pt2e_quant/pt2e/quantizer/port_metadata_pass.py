"""Names of torchao.quantization.pt2e.quantizer.port_metadata_pass."""

from pt2e_quant.flow.fx_passes import PortNodeMetaForQDQ

__all__ = ["PortNodeMetaForQDQ"]
