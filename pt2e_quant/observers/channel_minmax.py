"""Each channel's min and max, kept for smoothing, while the tensor is quantized as a whole."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.qparams import DEFAULT_EPS
from pt2e_quant.observers.base import PER_TENSOR, UniformQuantizationObserverBase
from pt2e_quant.observers.minmax import channel_range, resize_like_state, widen_channels

__all__ = ["ChannelMinMaxObserver"]


class ChannelMinMaxObserver(UniformQuantizationObserverBase):
    """The running min and max of each channel, and per-tensor qparams over all of them.

    Algorithms that move range from one channel to another (SmoothQuant and kin) read ``min_val``
    and ``max_val``, both [C]; ``scale_channels`` tells the observer what they did.

    Args:
        ch_axis: the axis of the channels.
        dtype: integer dtype to quantize to.
        qscheme: per_tensor_affine or per_tensor_symmetric.
        reduce_range: use one bit less; give quant_min and quant_max instead.
        quant_min: least integer used; the dtype's own if None.
        quant_max: greatest integer used; the dtype's own if None.
        factory_kwargs: device and dtype of the statistics.
        eps: the least scale.
        is_dynamic: must be False.
    """

    def __init__(
        self,
        ch_axis: int = -1,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None,
        eps: float = DEFAULT_EPS,
        is_dynamic: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dtype, qscheme, reduce_range, quant_min, quant_max, factory_kwargs, eps, is_dynamic,
            **kwargs,
        )  # fmt: skip
        self.require_qscheme(PER_TENSOR)
        self.require_static()
        self.ch_axis = ch_axis
        self.register_buffer("min_val", torch.tensor([], **self.factory_kwargs))
        self.register_buffer("max_val", torch.tensor([], **self.factory_kwargs))

    def forward(self, x_orig: Tensor) -> Tensor:
        """Widen each channel's running range by x_orig; returns x_orig."""
        x = self.observable(x_orig)
        if x is not None:
            low, high = channel_range(x, self.ch_axis, self.ignore_at_or_below)
            widen_channels(self, low, high)
        return x_orig

    @property
    def absmax(self) -> Tensor:
        """The greatest magnitude of each channel, [C]; 0 for a channel without data."""
        return torch.maximum(-self.min_val, self.max_val).clamp(min=0.0)

    def scale_channels(self, factors: Tensor) -> None:
        """Multiply each channel's range by a positive factor: what was done to the tensor itself.

        Args:
            factors: [C] or [1], greater than 0.
        """
        self.min_val.mul_(factors)
        self.max_val.mul_(factors)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero_point of the range over all channels, both [1]."""
        if not self.seen:
            return self.qparams_of(self.min_val, self.max_val)
        return self.qparams_of(self.min_val.min(), self.max_val.max())

    def reset_min_max_vals(self) -> None:
        """Forget all statistics, the number of channels too."""
        self._observed_once = False
        self.min_val.resize_(0)
        self.max_val.resize_(0)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        resize_like_state(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
