"""The choice of a tensor's observer, and the PT2E spec that names it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pt2e_quant.core.granularity import PerChannel, PerGroup, PerToken
from pt2e_quant.core.schemes import Role, TensorScheme
from pt2e_quant.core.specs import (
    BlockQuantizationSpec,
    DerivedQuantizationSpec,
    EdgeOrNode,
    FixedQParamsQuantizationSpec,
    QuantizationSpec,
    QuantizationSpecBase,
)
from pt2e_quant.graph.op_table import Slot
from pt2e_quant.observers.run_time.placeholder import (
    PerTokenPlaceholderObserver,
    PlaceholderObserver,
    RunTimeScales,
)
from pt2e_quant.observers.static.float_activation import FloatActivationObserver
from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver
from pt2e_quant.observers.static.rounded_scale import RoundedScaleObserver
from pt2e_quant.observers.weights.block_weight import BlockWeightObserver
from pt2e_quant.observers.weights.weight import WeightObserver
from pt2e_quant.observers.weights.weight_search import WeightSearch


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserverChoice:
    """Observer constructors by role.

    Args:
        activation: for inputs and outputs.
        weight: for per-tensor constants; None for what their scheme asks for.
        weight_per_channel: for per-channel constants, likewise.
        search: how the scales of groups are found, and of channels too unless it is MIN_MAX.
        ranged: for per-tensor constants by their range.
        ranged_per_channel: for per-channel ones.
        searched: for constants whose scales are searched for, or that are in all of int8.
    """

    activation: Any = MinMaxObserver
    weight: Any = None
    weight_per_channel: Any = None
    search: WeightSearch = WeightSearch.MIN_MAX
    ranged: Any = MinMaxObserver
    ranged_per_channel: Any = PerChannelMinMaxObserver
    searched: Any = WeightObserver

    def spec(self, slot: Slot, scheme: TensorScheme) -> QuantizationSpecBase:
        """The spec of a slot that is not derived."""
        if not is_plain(scheme):
            return BlockQuantizationSpec(
                dtype=scheme.dtype,
                observer_or_fake_quant_ctr=self._block_constructor(slot, scheme),
                scheme=scheme,
                is_dynamic=scheme.is_dynamic,
            )
        low, high = scheme.range
        axis = scheme.granularity.axis if isinstance(scheme.granularity, PerChannel) else None
        if slot.fixed is not None:
            scale, zero_point = slot.fixed
            return FixedQParamsQuantizationSpec(
                dtype=scheme.dtype,
                scale=scale,
                zero_point=zero_point,
                quant_min=low,
                quant_max=high,
                qscheme=qscheme_of(scheme),
            )
        return QuantizationSpec(
            dtype=scheme.dtype,
            observer_or_fake_quant_ctr=self._constructor(slot, scheme),
            quant_min=low,
            quant_max=high,
            qscheme=qscheme_of(scheme),
            ch_axis=axis,
            is_dynamic=scheme.is_dynamic,
        )

    def _block_constructor(self, slot: Slot, scheme: TensorScheme) -> Any:
        if slot.role is Role.WEIGHT:
            return BlockWeightObserver.with_args(search=self.search)
        return RunTimeScales if scheme.is_dynamic else FloatActivationObserver

    def _constructor(self, slot: Slot, scheme: TensorScheme) -> Any:
        found = self._of_any_scale(slot, scheme)
        if scheme.scales.is_power_of_two:
            return RoundedScaleObserver.with_args(observer=found)
        if scheme.scales.precision is not None:
            return RoundedScaleObserver.with_args(observer=found, precision=scheme.scales.precision)
        return found

    def _of_any_scale(self, slot: Slot, scheme: TensorScheme) -> Any:
        if slot.role is not Role.WEIGHT:
            if isinstance(scheme.granularity, PerToken):
                return PerTokenPlaceholderObserver
            return PlaceholderObserver if scheme.is_dynamic else self.activation
        search = self._search_for(scheme)
        if isinstance(scheme.granularity, PerGroup):
            group_size = scheme.granularity.group_size
            return WeightObserver.with_args(search=search, group_size=group_size)
        if not isinstance(scheme.granularity, PerChannel):
            if self.weight is None and scheme.is_full_int8:
                return self.searched.with_args(search=WeightSearch.MIN_MAX)
            return self.weight or self.ranged
        if search is WeightSearch.MIN_MAX:
            if self.weight_per_channel is not None:
                return self.weight_per_channel
            if not scheme.is_full_int8:
                return self.ranged_per_channel
        return self.searched.with_args(search=search, ch_axis=scheme.granularity.axis)

    def _search_for(self, scheme: TensorScheme) -> WeightSearch:
        """The search for scales; min-max scales would round most ternary weights to 0."""
        low, high = scheme.range
        is_ternary = high - low <= 2 and self.search is WeightSearch.MIN_MAX
        return WeightSearch.MSE if is_ternary else self.search


def is_plain(scheme: TensorScheme) -> bool:
    """True if torch's qschemes can express a scheme; its groups must run along the last axis."""
    granularity = scheme.granularity
    return scheme.is_plain and not (isinstance(granularity, PerGroup) and granularity.axis != -1)


def qscheme_of(scheme: TensorScheme) -> torch.qscheme:
    """Torch's name for a scheme's granularity and symmetry."""
    if isinstance(scheme.granularity, PerChannel | PerGroup):
        return torch.per_channel_symmetric if scheme.symmetric else torch.per_channel_affine
    return torch.per_tensor_symmetric if scheme.symmetric else torch.per_tensor_affine


def derived_spec(scheme: TensorScheme, sources: list[EdgeOrNode]) -> DerivedQuantizationSpec:
    """The spec of an int32 bias: its scale is the product of its sources' scales."""
    low, high = scheme.range
    axis = scheme.granularity.axis if isinstance(scheme.granularity, PerChannel) else None
    return DerivedQuantizationSpec(
        derived_from=sources,
        derive_qparams_fn=derive_bias_qparams,
        dtype=scheme.dtype,
        quant_min=low,
        quant_max=high,
        qscheme=qscheme_of(scheme),
        ch_axis=axis,
    )


def derive_bias_qparams(observers: list[nn.Module]) -> tuple[Tensor, Tensor]:
    """(scale, zero_point) of a bias: the product of its sources' scales, and 0."""
    scale = torch.ones(1)
    for observer in observers:
        calculate: Any = observer.calculate_qparams
        scale = scale * calculate()[0].to(torch.float32).cpu()
    return scale, torch.zeros(scale.shape, dtype=torch.int32)
