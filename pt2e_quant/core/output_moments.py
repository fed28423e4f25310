"""Mean and deviation of an operator's output channels, where a folded batch norm told them."""

from dataclasses import dataclass

from torch import Tensor

OUTPUT_MOMENTS_KEY = "pt2e_quant.output_moments"
"""The key of `node.meta` that holds them."""


@dataclass(frozen=True, slots=True)
class OutputMoments:
    """What a batch norm gives its output: mean beta and deviation |gamma|, float64[C] both."""

    mean: Tensor
    deviation: Tensor

    def scaled(self, factors: Tensor) -> "OutputMoments":
        """Those of channels multiplied by positive factors [C]."""
        return OutputMoments(self.mean * factors, self.deviation * factors)
