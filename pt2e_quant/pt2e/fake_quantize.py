"""Fake-quantizes under the names of torchao.quantization.pt2e.fake_quantize."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.granularity import PerChannel, PerGroup, PerTensor
from pt2e_quant.observers.observe_whole import give_size
from pt2e_quant.observers.static.histogram import HistogramObserver
from pt2e_quant.observers.static.moving_average import (
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from pt2e_quant.observers.training.fake_quantize import (
    FakeQuantize,
    FakeQuantizeBase,
    disable_fake_quant,
    disable_observer,
    enable_fake_quant,
    enable_observer,
    updates_where,
)
from pt2e_quant.observers.training.fixed_fake_quantize import FixedQParamsFakeQuantize
from pt2e_quant.observers.training.fused_fake_quantize import FusedMovingAvgObsFakeQuantize
from pt2e_quant.pt2e.observer import (
    default_fixed_qparams_range_0to1_observer,
    default_fixed_qparams_range_neg1to1_observer,
)
from pt2e_quant.pt2e.observers.affine import AffineQuantizedMinMaxObserver
from pt2e_quant.pt2e.observers.affine_qparams import (
    MappingType,
    fake_quantize_affine,
    integer_range,
)

__all__ = [
    "AffineFakeQuantize",
    "FakeQuantize",
    "FakeQuantizeBase",
    "FixedQParamsFakeQuantize",
    "FusedMovingAvgObsFakeQuantize",
    "default_affine_fake_quant",
    "default_affine_fixed_qparams_fake_quant",
    "default_affine_per_axis_fake_quant",
    "default_dynamic_fake_quant",
    "default_embedding_fake_quant",
    "default_embedding_fake_quant_4bit",
    "default_fake_quant",
    "default_fixed_qparams_range_0to1_fake_quant",
    "default_fixed_qparams_range_neg1to1_fake_quant",
    "default_fused_act_fake_quant",
    "default_fused_per_channel_wt_fake_quant",
    "default_fused_wt_fake_quant",
    "default_groupwise_fake_quant",
    "default_histogram_fake_quant",
    "default_per_channel_weight_fake_quant",
    "default_symmetric_fixed_qparams_fake_quant",
    "default_weight_fake_quant",
    "disable_fake_quant",
    "disable_observer",
    "enable_fake_quant",
    "enable_observer",
    "fused_per_channel_wt_fake_quant_range_neg_127_to_127",
    "fused_wt_fake_quant_range_neg_127_to_127",
]


class AffineFakeQuantize(FakeQuantizeBase):
    """Fake-quantize by the qparams of an affine observer.

    Args:
        observer: makes an AffineQuantizedObserverBase.
        is_dynamic: convert chooses qparams at run time.
        observer_kwargs: further arguments of the observer.

    Raises:
        ConfigError: the observer is of another kind.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        observer: Callable[..., Any] = AffineQuantizedMinMaxObserver,
        is_dynamic: bool = False,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__()
        made = observer(**observer_kwargs, is_dynamic=is_dynamic)
        if not hasattr(made, "granularity"):
            raise ConfigError(
                f"AffineFakeQuantize needs an affine observer, found {type(made).__name__}",
                fix="use FakeQuantize",
            )
        self.activation_post_process = made
        self.target_dtype = made.target_dtype
        self.quant_min = made.quant_min
        self.quant_max = made.quant_max
        self.zero_point_domain = made.zero_point_domain
        self.mapping_type = made.mapping_type
        self.granularity = made.granularity
        self.is_dynamic = is_dynamic
        is_float = getattr(self.zero_point_domain, "name", "") == "FLOAT"
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer(
            "zero_point", torch.zeros(1, dtype=torch.float32 if is_float else torch.int32)
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to quantize to."""
        return self.target_dtype  # type: ignore[no-any-return]  # read off an observer of any library

    @property
    def block_size(self) -> tuple[int, ...] | None:
        """Shape of a block, None until the first forward pass."""
        return self.activation_post_process.block_size  # type: ignore[no-any-return]  # as above

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The scale and zero_point that the observer's statistics call for."""
        scale, zero_point = self.activation_post_process.calculate_qparams()
        return scale, zero_point

    def forward(self, X: Tensor) -> Tensor:
        """Observe X and return it quantized and dequantized, as far as enabled."""
        if torch.compiler.is_compiling():
            with updates_where(self.observer_enabled[0] == 1, self):
                self.activation_post_process(X.detach())
                self._copy_qparams()
            return torch.where(self.fake_quant_enabled[0] == 1, self._quantized(X), X)
        is_observing = self.is_observing
        if is_observing or self.block_size is None:
            # Without the observer the block size would not be known.
            self.activation_post_process(X.detach())
        if is_observing:
            self._copy_qparams()
        return X if self.fake_quant_enabled[0] != 1 else self._quantized(X)

    def _quantized(self, X: Tensor) -> Tensor:
        assert self.block_size is not None
        low, high = integer_range(self.target_dtype, self.quant_min, self.quant_max)
        domain = getattr(self.zero_point_domain, "name", "INT")
        return fake_quantize_affine(
            X,
            self.block_size,
            self.scale,
            None if domain == "NONE" else self.zero_point,
            quant_min=low,
            quant_max=high,
            domain=domain,
        )

    def _copy_qparams(self) -> None:
        scale, zero_point = self.calculate_qparams()
        if self.scale.shape != scale.shape:
            give_size(self, scale=scale.shape)
        self.scale.copy_(scale)
        if zero_point is not None:
            if self.zero_point.shape != zero_point.shape:
                give_size(self, zero_point=zero_point.shape)
            self.zero_point.copy_(zero_point)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for name, buffer in (("scale", self.scale), ("zero_point", self.zero_point)):
            if isinstance(value := state_dict.get(prefix + name), Tensor):
                buffer.resize_(value.shape)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Replace this module's node by q/dq of torchao's operators, as its observer does."""
        self.activation_post_process.convert(model, observer_node)


# 0 .. 255 is halved to 0 .. 127 by reduce_range, as upstream; the constructor itself warns of it.
default_fake_quant = FakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver,
    quant_min=0,
    quant_max=255,
    dtype=torch.quint8,
    qscheme=torch.per_tensor_affine,
    reduce_range=True,
)
default_weight_fake_quant = FakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver,
    quant_min=-128,
    quant_max=127,
    dtype=torch.qint8,
    qscheme=torch.per_tensor_symmetric,
    reduce_range=False,
)
default_dynamic_fake_quant = FakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver,
    quant_min=0,
    quant_max=255,
    is_dynamic=True,
    dtype=torch.quint8,
    averaging_constant=1,
)
default_fixed_qparams_range_neg1to1_fake_quant = FixedQParamsFakeQuantize.with_args(
    observer=default_fixed_qparams_range_neg1to1_observer
)
default_fixed_qparams_range_0to1_fake_quant = FixedQParamsFakeQuantize.with_args(
    observer=default_fixed_qparams_range_0to1_observer
)
default_symmetric_fixed_qparams_fake_quant = default_fixed_qparams_range_neg1to1_fake_quant
default_affine_fixed_qparams_fake_quant = default_fixed_qparams_range_0to1_fake_quant
default_per_channel_weight_fake_quant = FakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver,
    quant_min=-128,
    quant_max=127,
    dtype=torch.qint8,
    qscheme=torch.per_channel_symmetric,
    reduce_range=False,
    ch_axis=0,
)
default_embedding_fake_quant = FakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver,
    qscheme=torch.per_channel_affine_float_qparams,
    dtype=torch.quint8,
    quant_min=0,
    quant_max=255,
    ch_axis=0,
    averaging_constant=1,
)
default_embedding_fake_quant_4bit = FakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver,
    qscheme=torch.per_channel_affine_float_qparams,
    ch_axis=0,
    dtype=torch.quint4x2,
    averaging_constant=1,
)
default_histogram_fake_quant = FakeQuantize.with_args(
    observer=HistogramObserver,
    quant_min=0,
    quant_max=255,
    dtype=torch.quint8,
    qscheme=torch.per_tensor_affine,
    reduce_range=True,
)
default_fused_act_fake_quant = FusedMovingAvgObsFakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
)
default_fused_wt_fake_quant = FusedMovingAvgObsFakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver,
    quant_min=-128,
    quant_max=127,
    dtype=torch.qint8,
    qscheme=torch.per_tensor_symmetric,
)
default_fused_per_channel_wt_fake_quant = FusedMovingAvgObsFakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver,
    quant_min=-128,
    quant_max=127,
    dtype=torch.qint8,
    qscheme=torch.per_channel_symmetric,
)
fused_wt_fake_quant_range_neg_127_to_127 = FusedMovingAvgObsFakeQuantize.with_args(
    observer=MovingAverageMinMaxObserver,
    quant_min=-127,
    quant_max=127,
    dtype=torch.qint8,
    qscheme=torch.per_tensor_symmetric,
    eps=2**-12,
)
fused_per_channel_wt_fake_quant_range_neg_127_to_127 = FusedMovingAvgObsFakeQuantize.with_args(
    observer=MovingAveragePerChannelMinMaxObserver,
    quant_min=-127,
    quant_max=127,
    dtype=torch.qint8,
    qscheme=torch.per_channel_symmetric,
    eps=2**-12,
)
default_affine_fake_quant = AffineFakeQuantize.with_args(
    observer=AffineQuantizedMinMaxObserver,
    mapping_type=MappingType.ASYMMETRIC,
    target_dtype=torch.uint8,
    granularity=PerTensor(),
)
default_groupwise_fake_quant = AffineFakeQuantize.with_args(
    observer=AffineQuantizedMinMaxObserver,
    mapping_type=MappingType.SYMMETRIC,
    target_dtype=torch.int8,
    granularity=PerGroup(128),
)
default_affine_per_axis_fake_quant = AffineFakeQuantize.with_args(
    observer=AffineQuantizedMinMaxObserver,
    mapping_type=MappingType.SYMMETRIC,
    target_dtype=torch.int8,
    granularity=PerChannel(0),
)
