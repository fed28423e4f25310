"""Fake-quantize of blocks of any shape: per tensor, axis, group, token or block."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.observers.training.fake_quantize import FakeQuantizeBase
from pt2e_quant.pt2e.observers.affine import AffineQuantizedMinMaxObserver
from pt2e_quant.pt2e.observers.affine_qparams import fake_quantize_affine, integer_range

__all__ = ["AffineFakeQuantize"]


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
        is_observing = self.observer_enabled[0] == 1
        if is_observing or self.block_size is None:
            # Without the observer the block size would not be known.
            self.activation_post_process(X.detach())
        if is_observing:
            self._copy_qparams()
        if self.fake_quant_enabled[0] != 1:
            return X
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
            self.scale.resize_(scale.shape)
        self.scale.copy_(scale)
        if zero_point is not None:
            if self.zero_point.shape != zero_point.shape:
                self.zero_point.resize_(zero_point.shape)
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
