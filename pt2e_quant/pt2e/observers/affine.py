"""Observers of blocks of any shape: per tensor, axis, group, token or block.

Names and arguments are those of torchao's PT2E. Granularities and enums of torchao are read by
name, so scripts may hand in either library's.
"""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.observers.partial_wrapper import PartialWrapper
from pt2e_quant.pt2e.observers.affine_qparams import (
    MappingType,
    ZeroPointDomain,
    block_view,
    choose_affine_qparams,
    insert_affine_qdq,
    integer_range,
)
from pt2e_quant.pt2e.observers.block_size import get_block_size

__all__ = [
    "AffineQuantizedMinMaxObserver",
    "AffineQuantizedMovingAverageMinMaxObserver",
    "AffineQuantizedObserverBase",
    "AffineQuantizedPlaceholderObserver",
]


class AffineQuantizedObserverBase(ABC, nn.Module):
    """An observer of blocks.

    Args:
        mapping_type: how a range is laid over the integers.
        target_dtype: integer dtype to quantize to.
        granularity: which elements share qparams.
        quant_min: least integer used; the dtype's own if None.
        quant_max: greatest integer used; the dtype's own if None.
        eps: the least scale; that of the data's dtype if None.
        scale_dtype: dtype of scales; that of the data if None.
        zero_point_dtype: dtype of zero_points; that of the data if None.
        preserve_zero: 0.0 is mapped to an integer exactly.
        zero_point_domain: what a zero_point is.
        kwargs: ignored: fields of specs that mean nothing here.

    Raises:
        ConfigError: there is no granularity.
    """

    min_val: Tensor | None
    max_val: Tensor | None

    def __init__(
        self,
        mapping_type: MappingType,
        target_dtype: torch.dtype,
        granularity: Any,
        quant_min: int | None = None,
        quant_max: int | None = None,
        eps: float | None = None,
        scale_dtype: torch.dtype | None = None,
        zero_point_dtype: torch.dtype | None = None,
        preserve_zero: bool = True,
        zero_point_domain: ZeroPointDomain | None = ZeroPointDomain.INT,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if granularity is None:
            raise ConfigError(f"{type(self).__name__} needs a granularity", fix="PerTensor()")
        self.mapping_type = mapping_type
        self.target_dtype = target_dtype
        self.granularity = granularity
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.eps = eps
        self.scale_dtype = scale_dtype
        self.zero_point_dtype = zero_point_dtype
        self.preserve_zero = preserve_zero
        self.zero_point_domain = zero_point_domain
        self.is_dynamic = bool(kwargs.get("is_dynamic", False))
        self.block_size: tuple[int, ...] | None = None
        self.original_dtype: torch.dtype | None = None
        # None until the first data: such buffers are in no state dict.
        self.register_buffer("min_val", None)
        self.register_buffer("max_val", None)

    @classmethod
    def with_args(cls, **kwargs: Any) -> PartialWrapper:
        """A constructor of this observer with some arguments given."""
        return PartialWrapper(partial(cls, **kwargs))

    @abstractmethod
    def forward(self, input: Tensor) -> Tensor:
        """Gather statistics; returns the input itself."""

    @abstractmethod
    def calculate_qparams(self) -> tuple[Tensor, Tensor | None]:
        """The scale and zero_point of each block."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to quantize to."""
        return self.target_dtype

    @property
    def seen(self) -> bool:
        """True if any data has come in."""
        return self.min_val is not None

    def block_ranges(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Least and greatest value of each block; remembers block size and dtype."""
        self.original_dtype = x.dtype
        self.block_size = get_block_size(tuple(x.shape), self.granularity)
        blocks, within, _ = block_view(x, self.block_size)
        return torch.amin(blocks, dim=within), torch.amax(blocks, dim=within)

    def qparams_of_ranges(self) -> tuple[Tensor, Tensor | None]:
        """Scale and zero_point of the ranges gathered.

        Raises:
            UnsupportedError: no data has come in.
        """
        if self.min_val is None or self.max_val is None:
            raise UnsupportedError(f"{type(self).__name__} saw no data to take qparams from")
        low, high = integer_range(self.target_dtype, self.quant_min, self.quant_max)
        domain = self.zero_point_domain
        scale, zero_point = choose_affine_qparams(
            self.min_val,
            self.max_val,
            self.mapping_type.name,
            quant_min=low,
            quant_max=high,
            eps=self.eps,
            preserve_zero=self.preserve_zero,
            domain=None if domain is None else domain.name,
        )
        if zero_point is not None:
            zero_point = zero_point.to(self.zero_point_dtype or self.min_val.dtype)
        return scale.to(self.scale_dtype or self.min_val.dtype), zero_point

    def convert(self, model: GraphModule, observer_node: Node) -> None:
        """Replace this observer's node by q/dq of torchao's operators.

        Raises:
            MissingExtraError: torchao is not installed.
            UnsupportedError: no data has come in.
        """
        if self.block_size is None or self.original_dtype is None:
            raise UnsupportedError(f"{type(self).__name__} saw no data", node=observer_node)
        qparams = None if self.is_dynamic else self.calculate_qparams()
        insert_affine_qdq(model, observer_node, self, qparams)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Buffers that the first data would make are made from the state.
        for name in ("min_val", "max_val"):
            value = state_dict.get(prefix + name)
            if getattr(self, name) is None and isinstance(value, Tensor):
                setattr(self, name, torch.empty_like(value))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class AffineQuantizedMinMaxObserver(AffineQuantizedObserverBase):
    """The least and greatest value ever seen in each block."""

    def forward(self, input: Tensor) -> Tensor:
        """Widen the range of each block; returns the input."""
        if input.numel() > 0:
            low, high = self.block_ranges(input.detach())
            if self.min_val is None or self.max_val is None:
                self.min_val, self.max_val = low, high
            else:
                self.min_val.copy_(torch.minimum(self.min_val, low))
                self.max_val.copy_(torch.maximum(self.max_val, high))
        return input

    def calculate_qparams(self) -> tuple[Tensor, Tensor | None]:
        """Scale and zero_point of each block."""
        return self.qparams_of_ranges()


class AffineQuantizedMovingAverageMinMaxObserver(AffineQuantizedObserverBase):
    """The moving average of the least and greatest value of each block.

    Args:
        mapping_type: how a range is laid over the integers.
        target_dtype: integer dtype to quantize to.
        granularity: which elements share qparams.
        averaging_constant: weight of the newest batch.
        quant_min: least integer used; the dtype's own if None.
        quant_max: greatest integer used; the dtype's own if None.
        eps: the least scale; that of the data's dtype if None.
        is_dynamic: qparams are computed at run time; needs averaging_constant 1.
        scale_dtype: dtype of scales; that of the data if None.
        zero_point_dtype: dtype of zero_points; that of the data if None.
        preserve_zero: 0.0 is mapped to an integer exactly.
        zero_point_domain: what a zero_point is.
        kwargs: ignored: fields of specs that mean nothing here.
    """

    def __init__(
        self,
        mapping_type: MappingType,
        target_dtype: torch.dtype,
        granularity: Any,
        averaging_constant: float = 0.01,
        quant_min: int | None = None,
        quant_max: int | None = None,
        eps: float | None = None,
        is_dynamic: bool = False,
        scale_dtype: torch.dtype | None = None,
        zero_point_dtype: torch.dtype | None = None,
        preserve_zero: bool = True,
        zero_point_domain: ZeroPointDomain | None = ZeroPointDomain.INT,
        **kwargs: Any,
    ) -> None:
        if is_dynamic and averaging_constant != 1:
            raise ConfigError(
                f"a dynamic moving average needs averaging_constant=1, found {averaging_constant}"
            )
        super().__init__(
            mapping_type, target_dtype, granularity, quant_min, quant_max, eps, scale_dtype,
            zero_point_dtype, preserve_zero, zero_point_domain, is_dynamic=is_dynamic,
        )  # fmt: skip
        self.averaging_constant = averaging_constant

    def forward(self, input: Tensor) -> Tensor:
        """Move the range of each block towards the input's; returns the input."""
        if input.numel() > 0:
            low, high = self.block_ranges(input.detach())
            if self.min_val is None or self.max_val is None:
                self.min_val, self.max_val = low, high
            else:
                share = self.averaging_constant
                self.min_val.copy_(self.min_val + share * (low - self.min_val))
                self.max_val.copy_(self.max_val + share * (high - self.max_val))
        return input

    def calculate_qparams(self) -> tuple[Tensor, Tensor | None]:
        """Scale and zero_point of each block."""
        return self.qparams_of_ranges()


class AffineQuantizedPlaceholderObserver(AffineQuantizedObserverBase):
    """Gathers nothing: says how blocks are quantized at run time."""

    def __init__(
        self,
        mapping_type: MappingType,
        target_dtype: torch.dtype,
        granularity: Any,
        quant_min: int | None = None,
        quant_max: int | None = None,
        eps: float | None = None,
        is_dynamic: bool = False,
        scale_dtype: torch.dtype | None = None,
        zero_point_dtype: torch.dtype | None = None,
        preserve_zero: bool = True,
        zero_point_domain: ZeroPointDomain | None = ZeroPointDomain.INT,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            mapping_type, target_dtype, granularity, quant_min, quant_max, eps, scale_dtype,
            zero_point_dtype, preserve_zero, zero_point_domain, is_dynamic=is_dynamic,
        )  # fmt: skip

    @property
    def seen(self) -> bool:
        """True if a forward pass told the block size."""
        return self.block_size is not None

    def forward(self, input: Tensor) -> Tensor:
        """Remember block size and dtype; returns the input."""
        self.block_size = get_block_size(tuple(input.shape), self.granularity)
        self.original_dtype = input.dtype
        return input

    def calculate_qparams(self) -> tuple[Tensor, Tensor | None]:
        """Always refused: there are no statistics."""
        raise UnsupportedError("a placeholder gathers nothing to calculate qparams from")
