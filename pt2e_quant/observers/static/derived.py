"""The stand-in observer of qparams that are computed from those of other observers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.observers.base import ObserverBase
from pt2e_quant.observers.qschemes import is_per_channel


class DerivedObserverOrFakeQuantize(ObserverBase):
    """Sees nothing itself; its sources do.

    Args:
        dtype: integer dtype to quantize to.
        obs_or_fqs: the observers that the function is called with.
        derive_qparams_fn: takes them, returns (scale, zero_point).
        quant_min: least integer used; the dtype's own if None.
        quant_max: greatest integer used; the dtype's own if None.
        qscheme: per tensor or per channel, affine or symmetric.
        ch_axis: the channel axis where the scheme is per channel.

    Raises:
        ConfigError: the scheme is per channel and there is no axis.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        obs_or_fqs: list[Any],
        derive_qparams_fn: Callable[[list[Any]], tuple[Tensor, Tensor]],
        quant_min: int | None = None,
        quant_max: int | None = None,
        qscheme: torch.qscheme | None = None,
        ch_axis: int | None = None,
    ) -> None:
        super().__init__(dtype)
        if qscheme is not None and is_per_channel(qscheme) and ch_axis is None:
            raise ConfigError("a derived per-channel qscheme needs a ch_axis")
        # A list, not a ModuleList: the sources are in the model under their own names.
        self.obs_or_fqs = obs_or_fqs
        self.derive_qparams_fn = derive_qparams_fn
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.qscheme = qscheme
        self.ch_axis = ch_axis
        self.fake_quantizes = False

    def forward(self, x: Tensor) -> Tensor:
        """Return x, in training for quantization as quantized by the derived qparams."""
        if not self.fake_quantizes or not self._is_integer:
            return x
        if torch.compiler.is_compiling():  # which cannot branch on what the sources have seen
            return torch.where(self._sources_have_data(), self._quantized(x), x)
        return self._quantized(x) if self.seen else x

    def _sources_have_data(self) -> Tensor:
        """`seen` as a tensor, of sources whose statistics are a range; others need no data."""
        observers = [getattr(s, "activation_post_process", s) for s in self.obs_or_fqs]
        ranges = [(o.min_val, o.max_val) for o in observers if hasattr(o, "min_val")]
        has_data = torch.tensor(True)
        for low, high in ranges:
            has_data = has_data & bool(low.numel()) & (low <= high).any().to(has_data.device)
        return has_data

    def _quantized(self, x: Tensor) -> Tensor:
        scale, zero_point = (q.to(x.device) for q in self.calculate_qparams())
        limits = torch.iinfo(self.dtype)
        low = limits.min if self.quant_min is None else self.quant_min
        high = limits.max if self.quant_max is None else self.quant_max
        if self.qscheme is not None and is_per_channel(self.qscheme):
            axis = int(self.ch_axis or 0)
            return torch.fake_quantize_per_channel_affine(x, scale, zero_point, axis, low, high)
        return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, low, high)

    @property
    def _is_integer(self) -> bool:
        return not self.dtype.is_floating_point

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """(scale, zero_point) as the function derives them."""
        scale, zero_point = self.derive_qparams_fn(self.obs_or_fqs)
        return scale, zero_point

    @property
    def seen(self) -> bool:
        """True if the sources have seen data."""
        return all(getattr(source, "seen", True) for source in self.obs_or_fqs)
