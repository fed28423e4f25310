"""Algorithms of post-training quantization: what they need, where they apply, what they change."""

from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph
from pt2e_quant.passes.algorithms.balance_channels import BalanceChannels
from pt2e_quant.passes.algorithms.gptq import Gptq
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.scale_outputs import ScaleOutputs
from pt2e_quant.passes.algorithms.smooth_quant import SmoothQuant

__all__ = [
    "Algorithm",
    "AlgorithmGraph",
    "BalanceChannels",
    "Declined",
    "Gptq",
    "ScaleOutputs",
    "Site",
    "SmoothQuant",
    "Stage",
]
