"""Algorithms of post-training quantization: what they need, where they apply, what they change."""

from pt2e_quant.passes.algorithms.adaround import AdaRound
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph
from pt2e_quant.passes.algorithms.auto_round import AutoRound
from pt2e_quant.passes.algorithms.awq import Awq
from pt2e_quant.passes.algorithms.balance_channels import BalanceChannels
from pt2e_quant.passes.algorithms.batch_norm_reestimation import BatchNormReestimation
from pt2e_quant.passes.algorithms.bias_correction import AnalyticBiasCorrection, BiasCorrection
from pt2e_quant.passes.algorithms.cross_layer_equalization import CrossLayerEqualization
from pt2e_quant.passes.algorithms.gptq import Gptq
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.hqq import Hqq
from pt2e_quant.passes.algorithms.keep_float import KeepFloat
from pt2e_quant.passes.algorithms.low_rank import LowRank
from pt2e_quant.passes.algorithms.lwc import Lwc
from pt2e_quant.passes.algorithms.outlier_channel_splitting import OutlierChannelSplitting
from pt2e_quant.passes.algorithms.own_ranges import OwnRanges
from pt2e_quant.passes.algorithms.quarot import QuaRot
from pt2e_quant.passes.algorithms.run_time_scales import RunTimeScales
from pt2e_quant.passes.algorithms.scale_outputs import ScaleOutputs
from pt2e_quant.passes.algorithms.sequential_mse import SequentialMse
from pt2e_quant.passes.algorithms.smooth_quant import SmoothQuant

__all__ = [
    "AdaRound",
    "Algorithm",
    "AlgorithmGraph",
    "AnalyticBiasCorrection",
    "AutoRound",
    "Awq",
    "BalanceChannels",
    "BatchNormReestimation",
    "BiasCorrection",
    "CrossLayerEqualization",
    "Declined",
    "Gptq",
    "Hqq",
    "KeepFloat",
    "LowRank",
    "Lwc",
    "OutlierChannelSplitting",
    "OwnRanges",
    "QuaRot",
    "RunTimeScales",
    "ScaleOutputs",
    "SequentialMse",
    "Site",
    "SmoothQuant",
    "Stage",
]
