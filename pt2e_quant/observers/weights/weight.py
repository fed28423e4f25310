"""The observer of a constant weight: one look, and qparams per tensor, channel or group."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.qparams import DEFAULT_EPS
from pt2e_quant.observers.base import (
    PER_CHANNEL,
    PER_TENSOR,
    UniformQuantizationObserverBase,
    is_per_tensor,
)
from pt2e_quant.observers.weights.weight_search import (
    SearchScales,
    WeightSearch,
    qparams_of_range,
    search_qparams,
)


class WeightObserver(UniformQuantizationObserverBase):
    """Finds the qparams of a weight when it sees it; the last one seen counts.

    Args:
        dtype: integer dtype to quantize to.
        qscheme: per tensor, or per_channel_symmetric or per_channel_affine, also for groups.
        quant_min: least integer used; the dtype's own if None.
        quant_max: greatest integer used; the dtype's own if None.
        ch_axis: the axis of the channels; with groups, rows are along axis 0.
        group_size: how many neighbours along the last axis of a matrix share a scale; None for
            one scale per channel.
        search: how the scale is found.
        eps: the least scale.
        is_dynamic: must be False.

    Raises:
        ConfigError: at the first weight that has no such channels or groups.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        dtype: torch.dtype = torch.int8,
        qscheme: torch.qscheme = torch.per_channel_symmetric,
        quant_min: int | None = None,
        quant_max: int | None = None,
        ch_axis: int = 0,
        group_size: int | None = None,
        search: WeightSearch = WeightSearch.MIN_MAX,
        eps: float = DEFAULT_EPS,
        is_dynamic: bool = False,
    ) -> None:
        super().__init__(
            dtype, qscheme, quant_min=quant_min, quant_max=quant_max, eps=eps, is_dynamic=is_dynamic
        )
        self.require_qscheme(PER_TENSOR + PER_CHANNEL)
        self.require_static()
        self.ch_axis = ch_axis
        self.group_size = group_size
        self.search = search
        # Empty until the weight tells the number of rows.
        for name in ("min_val", "max_val", "scale"):
            self.register_buffer(name, torch.tensor([]))
        self.register_buffer("zero_point", torch.tensor([], dtype=torch.int32))

    def forward(self, x_orig: Tensor) -> Tensor:
        """Find the qparams of x_orig; returns x_orig."""
        x = self.observable(x_orig)
        if x is None:
            return x_orig
        rows = self._rows(x)
        low, high = (end.to(torch.float32) for end in (rows.amin(1), rows.amax(1)))
        self._keep(min_val=low, max_val=high)
        self.check_finite()
        how = {"quant_min": self.quant_min, "quant_max": self.quant_max}
        if self.search is WeightSearch.MIN_MAX:  # the range is known
            found = qparams_of_range(low, high, symmetric=self.is_symmetric, **how)
        elif torch.compiler.is_compiling():
            found = SearchScales(rows, self.search.value, symmetric=self.is_symmetric, **how)
        else:
            found = search_qparams(rows, self.search, symmetric=self.is_symmetric, **how)
        scale, zero_point = found
        shape = (x.shape[0], -1) if self.group_size is not None else (-1,)
        self._keep(scale=scale.reshape(shape), zero_point=zero_point.reshape(shape))
        return x_orig

    def _keep(self, **found: Tensor) -> None:
        """Set buffers; those that have their size already stay the same tensors, for training."""
        for name, value in found.items():
            held = self._buffers[name]
            if held is not None and held.shape == value.shape:
                held.copy_(value)
            else:  # assignment by attribute takes as long as finding the range of a small weight
                self._buffers[name] = value

    def _rows(self, x: Tensor) -> Tensor:
        """The weight as a matrix with a row for each scale."""
        if is_per_tensor(self.qscheme):
            return x.reshape(1, -1)
        if self.group_size is None:
            if not -x.dim() <= self.ch_axis < x.dim():
                raise ConfigError(
                    f"ch_axis {self.ch_axis} is out of range for a weight of shape {tuple(x.shape)}"
                )
            return x.movedim(self.ch_axis, 0).flatten(1) if x.dim() > 1 else x.unsqueeze(1)
        if x.dim() != 2 or x.shape[1] % self.group_size:
            raise ConfigError(
                f"groups of {self.group_size} do not divide the rows of a weight of shape "
                f"{tuple(x.shape)}",
                fix="use a group size that divides its columns, or another scheme for its module",
            )
        return x.reshape(-1, self.group_size)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero_point: [C], or [rows, groups]."""
        if not self.seen:
            return self.qparams_of(self.min_val, self.max_val)
        return self.scale, self.zero_point

    def reset_min_max_vals(self) -> None:
        """Forget the weight."""
        self._observed_once = False
        for name in ("min_val", "max_val", "scale", "zero_point"):
            getattr(self, name).resize_(0)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any
    ) -> None:
        for name in ("scale", "zero_point"):
            if isinstance(value := state_dict.get(prefix + name), Tensor):
                getattr(self, name).resize_(value.shape)
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)
