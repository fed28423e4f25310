"""Mean and deviation of an operator's output channels, taken from the batch norm folded into it."""

from dataclasses import dataclass

from torch import Tensor, as_tensor

OUTPUT_MOMENTS_KEY = "pt2e_quant.output_moments"
"""The key of `node.meta` that holds them."""


@dataclass(frozen=True, slots=True)
class OutputMoments:
    """The moments of a batch norm's output: mean beta, deviation |gamma|, float64[C] both."""

    mean: Tensor
    deviation: Tensor

    def mapped(self, scale: Tensor | float, shift: Tensor | float = 0.0) -> "OutputMoments":
        """The moments of y * scale + shift, where these are the moments of y."""
        return OutputMoments(self.mean * scale + shift, self.deviation * as_tensor(scale).abs())
