"""Observers under the names of torchao.quantization.pt2e.observer, and ours beside them."""

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from pt2e_quant.core.errors import ConfigError
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
from pt2e_quant.observers.training.fake_quantize import FakeQuantizeBase
from pt2e_quant.pt2e.observers.affine import (
    AffineQuantizedMinMaxObserver,
    AffineQuantizedMovingAverageMinMaxObserver,
    AffineQuantizedObserverBase,
    AffineQuantizedPlaceholderObserver,
)
from pt2e_quant.pt2e.observers.affine_qparams import MappingType, TorchAODType, ZeroPointDomain
from pt2e_quant.pt2e.observers.block_size import get_block_size
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
    "ObserverOrFakeQuantize",
    "ObserverOrFakeQuantizeConstructor",
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

_NAME = "activation_post_process"


def get_observer_state_dict(mod: nn.Module) -> "OrderedDict[str, Any]":
    """The entries of the state dict that belong to observers."""
    state = mod.state_dict()
    found = OrderedDict((key, value) for key, value in state.items() if _NAME in key)
    # Versions of observers stand in it; load needs them.
    found._metadata = getattr(state, "_metadata", None)  # type: ignore[attr-defined]  # torch's own place for it
    return found


def load_observer_state_dict(mod: nn.Module, obs_dict: dict[str, Any]) -> None:
    """Load what `get_observer_state_dict` gave into the observers of a model.

    Raises:
        ConfigError: an entry is missing or belongs to no observer of the model.
    """
    versions = getattr(obs_dict, "_metadata", None) or {}
    state = dict(obs_dict)
    missing: list[str] = []
    errors: list[str] = []
    wanted: set[str] = set()
    for name, module in mod.named_modules():
        if _NAME not in name:
            continue
        prefix = name + "."
        module._load_from_state_dict(
            state, prefix, versions.get(name, {}), True, missing, [], errors
        )
        own = module.state_dict(prefix=prefix)
        wanted.update(own)
    # A buffer that is not persistent, or an eps that older states lack, is not asked for.
    absent = sorted({key for key in missing if key in wanted})
    unexpected = sorted(key for key in state if key not in wanted)
    problems = [f"missing: {', '.join(absent)}"] if absent else []
    problems += [f"unexpected: {', '.join(unexpected)}"] if unexpected else []
    problems += errors
    if problems:
        raise ConfigError(
            f"the observers' state does not fit this model: {'; '.join(problems)}",
            fix="prepare the model with the same quantizer that the state was taken under",
        )


ObserverOrFakeQuantize = ObserverBase | FakeQuantizeBase
ObserverOrFakeQuantizeConstructor = PartialWrapper | type[ObserverBase] | type[FakeQuantizeBase]


default_observer = MinMaxObserver.with_args(quant_min=0, quant_max=127)
"""Activations in 7 bits, which no 16-bit accumulator of two products overflows."""

default_placeholder_observer = PlaceholderObserver
default_debug_observer = RecordingObserver
default_reuse_input_observer = ReuseInputObserver

default_weight_observer = MinMaxObserver.with_args(
    dtype=torch.qint8, qscheme=torch.per_tensor_symmetric
)
weight_observer_range_neg_127_to_127 = MinMaxObserver.with_args(
    dtype=torch.qint8,
    qscheme=torch.per_tensor_symmetric,
    quant_min=-127,
    quant_max=127,
    eps=2**-12,
)
"""Weights without -128; the least scale is one that XNNPACK takes."""

default_histogram_observer = HistogramObserver.with_args(quant_min=0, quant_max=127)
default_per_channel_weight_observer = PerChannelMinMaxObserver.with_args(
    dtype=torch.qint8, qscheme=torch.per_channel_symmetric
)
per_channel_weight_observer_range_neg_127_to_127 = PerChannelMinMaxObserver.with_args(
    dtype=torch.qint8,
    qscheme=torch.per_channel_symmetric,
    quant_min=-127,
    quant_max=127,
    eps=2**-12,
)
default_dynamic_quant_observer = PlaceholderObserver.with_args(
    dtype=torch.quint8, quant_min=0, quant_max=255, is_dynamic=True
)
default_float_qparams_observer = PerChannelMinMaxObserver.with_args(
    dtype=torch.quint8, qscheme=torch.per_channel_affine_float_qparams, ch_axis=0
)
"""Embedding tables: a real zero_point for each row."""

default_float_qparams_observer_4bit = PerChannelMinMaxObserver.with_args(
    dtype=torch.quint4x2, qscheme=torch.per_channel_affine_float_qparams, ch_axis=0
)
default_fixed_qparams_range_neg1to1_observer = FixedQParamsObserver.with_args(
    scale=2.0 / 256.0, zero_point=128, dtype=torch.quint8, quant_min=0, quant_max=255
)
"""For tanh."""

default_fixed_qparams_range_0to1_observer = FixedQParamsObserver.with_args(
    scale=1.0 / 256.0, zero_point=0, dtype=torch.quint8, quant_min=0, quant_max=255
)
"""For sigmoid and softmax."""

default_symmetric_fixed_qparams_observer = default_fixed_qparams_range_neg1to1_observer
default_affine_fixed_qparams_observer = default_fixed_qparams_range_0to1_observer
