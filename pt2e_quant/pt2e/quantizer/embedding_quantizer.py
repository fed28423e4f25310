"""Names of torchao.quantization.pt2e.quantizer.embedding_quantizer."""

from pt2e_quant.flow.embedding_quantizer import EmbeddingQuantizer, get_embedding_operators_config

__all__ = ["EmbeddingQuantizer", "get_embedding_operators_config"]
