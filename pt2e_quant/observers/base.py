"""Base class of observers: modules that gather statistics and return their input unchanged.

Names, constructor arguments and state-dict keys are those of torchao's PT2E observers, so that
scripts subclass these and reach into them as they did.
"""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from pt2e_quant.core.dtypes import limits_of
from pt2e_quant.core.errors import (
    CalibrationError,
    ConfigError,
    Pt2eQuantWarning,
    RangeError,
    SchemeError,
    UnsupportedError,
)
from pt2e_quant.core.qparams import (
    DEFAULT_EPS,
    choose_float_qparams,
    choose_qparams,
    symmetric_zero_point,
)
from pt2e_quant.observers.partial_wrapper import PartialWrapper
from pt2e_quant.observers.qschemes import (
    PER_CHANNEL,
    PER_TENSOR,
    SYMMETRIC,
    is_per_channel,
    is_per_tensor,
)

__all__ = [
    "PER_CHANNEL",
    "PER_TENSOR",
    "NonFinite",
    "ObserverBase",
    "UniformQuantizationObserverBase",
    "is_per_channel",
    "is_per_tensor",
    "upgrade_state",
]

_OLD_NAMES = {"min_vals": "min_val", "max_vals": "max_val"}
_UNSEEN = {"min_val": torch.inf, "max_val": -torch.inf}


def upgrade_state(
    state_dict: dict[str, Any], prefix: str, version: int | None, *, has_channels: bool
) -> None:
    """Rewrite the entries of one observer in place; today's version is left alone.

    Args:
        state_dict: the whole state dict.
        prefix: what the names of the observer start with.
        version: of the observer's metadata; None if it has none.
        has_channels: the observer's range is per channel.
    """
    if version is not None and version >= 3:
        return
    holds_range = any(prefix + name in state_dict for name in (*_OLD_NAMES, *_UNSEEN))
    if holds_range and (version is None or version < 2):
        state_dict.setdefault(prefix + "eps", torch.tensor([DEFAULT_EPS]))
    for old, new in _OLD_NAMES.items():
        if prefix + old in state_dict:
            state_dict[prefix + new] = state_dict.pop(prefix + old)
    for name, unseen in _UNSEEN.items():
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.shape == (0,) and not has_channels:
            state_dict[prefix + name] = torch.tensor(unseen)


class NonFinite(CalibrationError):
    """An observer saw NaN or infinity; whoever knows the node and the batch says them."""


class ObserverBase(ABC, nn.Module):
    """An observer of one qparam group.

    Args:
        dtype: integer dtype to quantize to.
        is_dynamic: qparams are computed at run time, so nothing is gathered here.
    """

    ignore_at_or_below: float | None = None
    """Entries at or below it are no data (the masked positions of attention scores)."""

    observes_constant: bool = False
    """The input never changes (a weight): it is observed once."""

    is_traceable: bool = True
    """A compiler can follow it; one that looks at values, per tensor, is an operator instead."""

    def __init__(self, dtype: torch.dtype, is_dynamic: bool = False) -> None:
        super().__init__()
        self.dtype = dtype
        self.is_dynamic = is_dynamic

    @classmethod
    def with_args(cls, **kwargs: Any) -> PartialWrapper:
        """A constructor of this observer with some arguments given."""
        return PartialWrapper(partial(cls, **kwargs))

    @classmethod
    def with_callable_args(cls, **kwargs: Callable[[], Any]) -> PartialWrapper:
        """A constructor of this observer with some arguments made at each construction."""
        return PartialWrapper(partial(cls)).with_callable_args(**kwargs)

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Gather statistics; returns x itself."""

    @abstractmethod
    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The scale and zero_point that the statistics call for."""

    @property
    def seen(self) -> bool:
        """True if the observer has the data it needs; true for one that needs none."""
        return True

    def twin(self) -> Self:
        """An observer of equal settings and statistics, in a quarter of a construction's time.

        What the constructor would check and compute is taken over, attribute by attribute. Tensors
        that are no buffers are shared: observers replace them, they do not write into them.
        """
        made = type(self).__new__(type(self))
        kinds = (dict, list, set)
        vars(made).update(
            [(k, v.copy() if isinstance(v, kinds) else v) for k, v in vars(self).items()]
        )
        for name, buffer in made._buffers.items():
            made._buffers[name] = None if buffer is None else buffer.clone()
        return made

    def check_finite(self) -> None:
        """Raise NonFinite if a NaN or infinity is in the statistics; costs no pass over data."""
        return


class UniformQuantizationObserverBase(ObserverBase):
    """An observer whose integers are evenly spaced: it gathers a range, per tensor or per channel.

    Args:
        dtype: integer dtype to quantize to.
        qscheme: per tensor or per channel, affine or symmetric.
        reduce_range: use one bit less; give quant_min and quant_max instead.
        quant_min: least integer used; the dtype's own if None.
        quant_max: greatest integer used; the dtype's own if None.
        factory_kwargs: device and dtype of the statistics.
        eps: the least scale.
        is_dynamic: qparams are computed at run time.
    """

    _version = 3
    eps: Tensor
    min_val: Tensor
    max_val: Tensor

    def __init__(
        self,
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
        super().__init__(dtype=dtype, is_dynamic=is_dynamic, **kwargs)
        if qscheme not in PER_TENSOR + PER_CHANNEL:
            raise ConfigError(f"{type(self).__name__} has no qscheme {qscheme}")
        if reduce_range:
            warnings.warn(
                "reduce_range is deprecated: give quant_min and quant_max instead",
                Pt2eQuantWarning,
                stacklevel=2,
            )
        self.qscheme = qscheme
        self.reduce_range = reduce_range
        self.factory_kwargs = dict(factory_kwargs or {})
        self.register_buffer("eps", torch.tensor([eps], **self.factory_kwargs))
        self.has_customized_qrange = quant_min is not None and quant_max is not None
        self.quant_min, self.quant_max = self._quant_range(quant_min, quant_max)
        self._observed_once = False
        self.make_statistics()

    def make_statistics(self) -> None:
        """Register the buffers that statistics are kept in; the constructor's last step.

        Observers whose constructor takes nothing more need no constructor of their own.
        """
        return

    def _quant_range(self, quant_min: int | None, quant_max: int | None) -> tuple[int, int]:
        limits = limits_of(self.dtype)
        if quant_min is None or quant_max is None:
            quant_min, quant_max = limits.quant_min, limits.quant_max
        if not quant_min <= 0 <= quant_max or quant_min >= quant_max:
            raise RangeError(
                f"quant_min {quant_min} .. quant_max {quant_max} must be a range that holds 0"
            )
        if not limits.holds(quant_min, quant_max):
            raise RangeError(
                f"quant_min {quant_min} .. quant_max {quant_max} does not fit in {self.dtype} "
                f"({limits.quant_min} .. {limits.quant_max})"
            )
        if self.reduce_range:
            # As upstream: -128 .. 127 becomes -64 .. 63, 0 .. 255 becomes 0 .. 127.
            return quant_min // 2, quant_max // 2
        return quant_min, quant_max

    def require_qscheme(self, allowed: tuple[torch.qscheme, ...]) -> None:
        """Raise SchemeError unless the qscheme is one that the observer can gather."""
        if self.qscheme not in allowed:
            known = ", ".join(str(qscheme) for qscheme in allowed)
            raise SchemeError(
                f"{type(self).__name__} has no qscheme {self.qscheme}", fix=f"use one of {known}"
            )
        # The middle of the reduced range is not the zero_point that symmetric uint8 gets.
        if self.reduce_range and self.is_symmetric and self.dtype == torch.quint8:
            raise SchemeError("reduce_range has no symmetric quint8")

    def require_static(self) -> None:
        """Raise SchemeError if dynamic quantization was asked of an observer that gathers data."""
        if self.is_dynamic:
            raise SchemeError(
                f"{type(self).__name__} gathers statistics and cannot be dynamic",
                fix="use PlaceholderObserver for dynamic quantization",
            )

    @property
    def is_symmetric(self) -> bool:
        """True if the range is made symmetric around 0.0."""
        return self.qscheme in SYMMETRIC

    @property
    def seen(self) -> bool:
        """True if any data has come in; compiled code, which knows no values, takes it for yes."""
        if self.min_val.numel() == 0:
            return False
        if torch.compiler.is_compiling():
            return True
        if self.min_val.numel() == 1:  # two reads cost a third of the tensor operations below
            return not (self.min_val.item() == torch.inf and self.max_val.item() == -torch.inf)
        if self.min_val.flatten()[0].item() != torch.inf:
            return True  # data comes to all channels at once, but for masked entries
        return not bool(torch.all((self.min_val == torch.inf) & (self.max_val == -torch.inf)))

    def check_finite(self) -> None:
        """Raise NonFinite if a NaN or infinity came in: it stays in the running min and max.

        Compiled code does not: convert checks again.
        """
        if torch.compiler.is_compiling():
            return
        if self.min_val.numel() == 1:
            low, high = self.min_val.item(), self.max_val.item()
            unseen = low == torch.inf and high == -torch.inf
            if not unseen and not (-torch.inf < low <= high < torch.inf):
                self.raise_non_finite(low, high)
        elif self.seen and not math.isfinite((self.max_val - self.min_val).sum().item()):
            finite = torch.isfinite(self.min_val) & torch.isfinite(self.max_val)
            if not bool(finite.all()):
                channel = int((~finite).nonzero()[0])
                low, high = self.min_val[channel].item(), self.max_val[channel].item()
                self.raise_non_finite(low, high, f" in channel {channel}")

    def raise_non_finite(self, low: float, high: float, where: str = "") -> NoReturn:
        """Raise NonFinite for a range that is none."""
        raise NonFinite(
            f"NaN or infinity in the observed values{where} (min {low}, max {high})",
            fix="find the input or operator that makes it; quantization needs finite values",
        )

    def observable(self, x: Tensor) -> Tensor | None:
        """The detached tensor to take statistics of, None if there is nothing (more) to see.

        Raises:
            UnsupportedError: if x is no real floating-point tensor.
        """
        if not x.is_floating_point():
            raise UnsupportedError(
                f"an observer takes floating-point tensors, found {x.dtype}",
                fix="leave this value out of the annotation: it is not quantized",
            )
        if x.numel() == 0 or (self.observes_constant and self._observed_once):
            return None
        self._observed_once = True
        return x.detach()

    def unmasked(self, x_orig: Tensor) -> Tensor | None:
        """The observable elements that are not masked, None if there is none."""
        x = self.observable(x_orig)
        if x is not None and self.ignore_at_or_below is not None:
            x = x[~(x <= self.ignore_at_or_below)]
        return x if x is not None and x.numel() > 0 else None

    def widened_range(self, x: Tensor, low: float, high: float) -> tuple[float, float]:
        """The range [low, high] widened by the elements of x.

        Raises:
            NonFinite: if x holds NaN or infinity.
        """
        least, greatest = (end.float().item() for end in torch.aminmax(x))
        if not -torch.inf < least <= greatest < torch.inf:
            self.raise_non_finite(least, greatest)
        return min(low, least), max(high, greatest)

    def qparams_of(self, min_val: Tensor, max_val: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero_point of a range under this observer's dtype and qscheme.

        Without any data the scale is 1.0 and a warning says so, as upstream.
        """
        if not self.seen:
            warnings.warn(
                f"{type(self).__name__} saw no data: its scale is 1.0 and its zero_point 0",
                Pt2eQuantWarning,
                stacklevel=3,
            )
            device = self.eps.device
            return torch.ones(1, device=device), torch.zeros(1, dtype=torch.int32, device=device)
        self.check_finite()
        if self.qscheme == torch.per_channel_affine_float_qparams:
            return choose_float_qparams(
                min_val,
                max_val,
                quant_min=self.quant_min,
                quant_max=self.quant_max,
                eps=self.eps,
            )
        scale, zero_point = choose_qparams(
            min_val,
            max_val,
            quant_min=self.quant_min,
            quant_max=self.quant_max,
            symmetric=self.is_symmetric,
            eps=self.eps,
            zero_point_if_symmetric=self.zero_point_if_symmetric,
        )
        if torch.compiler.is_compiling():
            has_data = (min_val <= max_val).any()
            return torch.where(has_data, scale, 1.0), torch.where(has_data, zero_point, 0)
        return scale, zero_point

    @property
    def zero_point_if_symmetric(self) -> int:
        """The zero_point that a symmetric range gets."""
        return symmetric_zero_point(
            self.dtype, self.quant_min, self.quant_max, has_own_range=self.has_customized_qrange
        )

    def reset_min_max_vals(self) -> None:
        """Forget all statistics."""
        raise UnsupportedError(f"{type(self).__name__} cannot be reset")

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *args: Any
    ) -> None:
        has_channels = is_per_channel(self.qscheme)
        upgrade_state(state_dict, prefix, metadata.get("version"), has_channels=has_channels)
        if has_channels:
            # Empty until the first data: take the number of channels from the state.
            for name, buffer in (("min_val", self.min_val), ("max_val", self.max_val)):
                if isinstance(value := state_dict.get(prefix + name), Tensor):
                    buffer.resize_(value.shape)
        super()._load_from_state_dict(state_dict, prefix, metadata, *args)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"min_val={self.min_val}, max_val={self.max_val}"
