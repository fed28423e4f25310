"""Observers under the names of torchao.quantization.pt2e.observer, and ours beside them."""

from pt2e_quant.core.granularity import (
    Granularity,
    PerAxis,
    PerBlock,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
)
from pt2e_quant.observers.base import ObserverBase, UniformQuantizationObserverBase
from pt2e_quant.observers.partial_wrapper import PartialWrapper
from pt2e_quant.observers.run_time.placeholder import NoopObserver, PlaceholderObserver
from pt2e_quant.observers.static.entropy import EntropyObserver
from pt2e_quant.observers.static.fixed import FixedQParamsObserver
from pt2e_quant.observers.static.histogram import HistogramObserver
from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver
from pt2e_quant.observers.static.moving_average import (
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from pt2e_quant.observers.static.mse import MSEObserver
from pt2e_quant.observers.static.percentile import PercentileObserver
from pt2e_quant.pt2e.observers.affine import (
    AffineQuantizedMinMaxObserver,
    AffineQuantizedMovingAverageMinMaxObserver,
    AffineQuantizedObserverBase,
    AffineQuantizedPlaceholderObserver,
)
from pt2e_quant.pt2e.observers.affine_qparams import MappingType, TorchAODType, ZeroPointDomain
from pt2e_quant.pt2e.observers.block_size import get_block_size
from pt2e_quant.pt2e.observers.defaults import (
    default_affine_fixed_qparams_observer,
    default_debug_observer,
    default_dynamic_quant_observer,
    default_fixed_qparams_range_0to1_observer,
    default_fixed_qparams_range_neg1to1_observer,
    default_float_qparams_observer,
    default_float_qparams_observer_4bit,
    default_histogram_observer,
    default_observer,
    default_per_channel_weight_observer,
    default_placeholder_observer,
    default_reuse_input_observer,
    default_symmetric_fixed_qparams_observer,
    default_weight_observer,
    per_channel_weight_observer_range_neg_127_to_127,
    weight_observer_range_neg_127_to_127,
)
from pt2e_quant.pt2e.observers.observer_state import (
    get_observer_state_dict,
    load_observer_state_dict,
)
from pt2e_quant.pt2e.observers.recording import RecordingObserver
from pt2e_quant.pt2e.observers.reuse_input import ReuseInputObserver

__all__ = [
    "AffineQuantizedMinMaxObserver",
    "AffineQuantizedMovingAverageMinMaxObserver",
    "AffineQuantizedObserverBase",
    "AffineQuantizedPlaceholderObserver",
    "EntropyObserver",
    "FixedQParamsObserver",
    "Granularity",
    "HistogramObserver",
    "MSEObserver",
    "MappingType",
    "MinMaxObserver",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "NoopObserver",
    "ObserverBase",
    "PartialWrapper",
    "PerAxis",
    "PerBlock",
    "PerChannelMinMaxObserver",
    "PerGroup",
    "PerRow",
    "PerTensor",
    "PerToken",
    "PercentileObserver",
    "PlaceholderObserver",
    "RecordingObserver",
    "ReuseInputObserver",
    "TorchAODType",
    "UniformQuantizationObserverBase",
    "ZeroPointDomain",
    "default_affine_fixed_qparams_observer",
    "default_debug_observer",
    "default_dynamic_quant_observer",
    "default_fixed_qparams_range_0to1_observer",
    "default_fixed_qparams_range_neg1to1_observer",
    "default_float_qparams_observer",
    "default_float_qparams_observer_4bit",
    "default_histogram_observer",
    "default_observer",
    "default_per_channel_weight_observer",
    "default_placeholder_observer",
    "default_reuse_input_observer",
    "default_symmetric_fixed_qparams_observer",
    "default_weight_observer",
    "get_block_size",
    "get_observer_state_dict",
    "load_observer_state_dict",
    "per_channel_weight_observer_range_neg_127_to_127",
    "weight_observer_range_neg_127_to_127",
]
