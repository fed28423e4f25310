"""Fake-quantize whose scale and zero_point are trained.

S. K. Esser and others, "Learned Step Size Quantization" (ICLR 2020), and for the zero_point
Y. Bhalgat and others, "LSQ+" (CVPR workshops 2020). The gradients are those of torch's operators.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.errors import ConfigError, RangeError
from pt2e_quant.observers.observe_whole import observe_where, qparams_where
from pt2e_quant.observers.qschemes import SYMMETRIC, is_per_channel
from pt2e_quant.observers.training.fake_quantize import FakeQuantizeBase, updates_where


class LearnableFakeQuantize(FakeQuantizeBase):
    """Fake-quantize with a trained scale, and a trained zero_point if the qscheme is affine.

    An observer gives both their first values at the first forward pass. `prepare_qat_pt2e` makes
    them beforehand; of a fake-quantize by itself they are None until then, so run one batch before
    the optimizer takes the parameters. Observing and learning exclude each other.

    Args:
        observer: makes the observer.
        quant_min: least integer used.
        quant_max: greatest integer used.
        use_grad_scaling: divide both gradients by sqrt(elements * quant_max), section 2.2 of LSQ.
        observer_kwargs: further arguments of the observer.

    Raises:
        RangeError: the range is none, or does not fit in the dtype.
    """

    scale: nn.Parameter | None
    zero_point: nn.Parameter | None
    learning_enabled: Tensor
    eps: Tensor
    _is_first: bool = True
    """No batch has come in since the fake-quantize was made, or a state was loaded."""

    def __init__(
        self,
        observer: Callable[..., Any],
        quant_min: int = 0,
        quant_max: int = 255,
        use_grad_scaling: bool = False,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__()
        made = observer(**{**observer_kwargs, "quant_min": quant_min, "quant_max": quant_max})
        if quant_min >= quant_max or not info(made.dtype).holds(quant_min, quant_max):
            raise RangeError(
                f"quant_min {quant_min} .. quant_max {quant_max} is no range within {made.dtype}"
            )
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.use_grad_scaling = use_grad_scaling
        self.register_parameter("scale", None)
        self.register_parameter("zero_point", None)
        self.activation_post_process = made
        self.dtype = made.dtype
        self.qscheme = made.qscheme
        self.ch_axis = getattr(made, "ch_axis", -1)
        self.is_dynamic = False
        self.register_buffer("learning_enabled", torch.tensor([0], dtype=torch.uint8))
        self.register_buffer("eps", torch.tensor([torch.finfo(torch.float32).eps]))

    def start_channels(self, channels: int) -> None:
        """Make scale and zero_point before the first batch, for optimizers and compilers.

        The scale is NaN until then, which the first batch replaces whether the fake-quantize
        observes or not.
        """
        device = self.eps.device
        self._set_qparams(
            torch.full((channels,), torch.nan, device=device), torch.zeros(channels, device=device)
        )

    @property
    def seen(self) -> bool:
        """True if scale and zero_point have values; compiled code takes it for yes."""
        if self.scale is None or not self._is_first or torch.compiler.is_compiling():
            return self.scale is not None
        return not bool(self.scale.isnan().any())

    @property
    def _initialized(self) -> bool:
        """The name of `seen` in torchao."""
        return self.seen

    def enable_range_learning(self) -> None:
        """Train scale and zero_point from now on; the observer stops."""
        self._learn(True)
        self.disable_observer()

    def disable_range_learning(self) -> None:
        """Keep scale and zero_point as they are from now on."""
        self._learn(False)

    def enable_observer(self, enabled: bool = True) -> None:
        """Gather statistics from now on, or not; learning stops."""
        self.observer_enabled[0] = int(enabled)
        if enabled:
            self.disable_range_learning()

    def _learn(self, enabled: bool) -> None:
        self.learning_enabled[0] = int(enabled)
        for parameter in (self.scale, self.zero_point):
            if parameter is not None:
                parameter.requires_grad_(enabled)

    def observe_quant_params(self) -> None:
        """Print scale and zero_point."""
        print(f"scale {self.scale}, zero_point {self.zero_point}")

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The trained scale, at least eps, and the zero_point, rounded and clamped (int64).

        Raises:
            ConfigError: there was no forward pass yet.
        """
        if not self.seen or self.scale is None or self.zero_point is None:
            raise ConfigError("this LearnableFakeQuantize has seen no data")
        self.scale.data.copy_(torch.maximum(self.scale.data, self.eps))
        zero_point = self.zero_point.detach().round().clamp(self.quant_min, self.quant_max)
        return self.scale.detach(), zero_point.long()

    def _set_qparams(self, scale: Tensor, zero_point: Tensor) -> None:
        if self.scale is None or self.zero_point is None:
            learns = bool(self.learning_enabled[0] == 1)
            self.scale = nn.Parameter(scale.clone(), requires_grad=learns)
            self.zero_point = nn.Parameter(zero_point.float(), requires_grad=learns)
        else:
            self.scale.data.copy_(scale)
            self.zero_point.data.copy_(zero_point)

    def forward(self, X: Tensor) -> Tensor:
        """Observe X and return it quantized and dequantized, as far as enabled."""
        if torch.compiler.is_compiling():
            self._observe_where_on(X)
            return torch.where(self.fake_quant_enabled[0] == 1, self._quantized(X), X)
        if self.is_observing or not self.seen:
            self._observe(X)
        self._is_first = False
        return X if self.fake_quant_enabled[0] != 1 else self._quantized(X)

    def _observe(self, X: Tensor) -> None:
        self.activation_post_process(X.detach())
        self._set_qparams(*self.activation_post_process.calculate_qparams())

    @partial(torch.compiler.disable, reason="the first batch makes scale and zero_point: run one")
    def _make_parameters(self, X: Tensor) -> None:
        self._observe(X)

    def _observe_where_on(self, X: Tensor) -> None:
        """Observe without a branch on the flag; what learns does not observe, once it has begun."""
        if self.scale is None:
            self._make_parameters(X)
        elif self._is_first or not self.scale.requires_grad:
            is_on = (self.observer_enabled[0] == 1) | self.scale.isnan().any()
            with updates_where(is_on, self):
                observe_where(self.activation_post_process, X.detach(), is_on)
                self._set_qparams(*qparams_where(self.activation_post_process, is_on))
        self._is_first = False

    def _quantized(self, X: Tensor) -> Tensor:
        """X quantized and dequantized by the parameters."""
        assert self.scale is not None
        assert self.zero_point is not None
        if self.qscheme in SYMMETRIC:
            self.zero_point.data.zero_()
        factor = 1.0 / (X.numel() * self.quant_max) ** 0.5 if self.use_grad_scaling else 1.0
        limits = (self.quant_min, self.quant_max, factor)
        if is_per_channel(self.qscheme):
            return torch._fake_quantize_learnable_per_channel_affine(
                X, self.scale, self.zero_point, self.ch_axis, *limits
            )
        return torch._fake_quantize_learnable_per_tensor_affine(
            X, self.scale, self.zero_point, *limits
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # Parameters that the first batch would make are made from the state.
        scale, zero_point = state_dict.get(prefix + "scale"), state_dict.get(prefix + "zero_point")
        if self.scale is None and isinstance(scale, Tensor) and isinstance(zero_point, Tensor):
            self._set_qparams(
                torch.empty_like(scale, device=self.eps.device),
                torch.empty_like(zero_point, device=self.eps.device),
            )
        self._is_first = True  # the state may be of before the first batch
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def enable_range_learning(mod: nn.Module) -> None:
    """Let a learnable fake-quantize learn; for `model.apply`, other modules stay as they are."""
    if isinstance(mod, LearnableFakeQuantize):
        mod.enable_range_learning()


def disable_range_learning(mod: nn.Module) -> None:
    """Let a learnable fake-quantize keep its range; for `model.apply`."""
    if isinstance(mod, LearnableFakeQuantize):
        mod.disable_range_learning()
