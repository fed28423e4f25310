"""Names of torchao.quantization.pt2e.learnable_fake_quantize."""

from pt2e_quant.observers.training.learnable_fake_quantize import (
    LearnableFakeQuantize,
    disable_range_learning,
    enable_range_learning,
)

__all__ = ["LearnableFakeQuantize", "disable_range_learning", "enable_range_learning"]
