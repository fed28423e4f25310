"""Fake-quantize: quantize and dequantize in training, with a straight-through gradient.

Arguments, numerics and state-dict keys are those of torchao's PT2E: each holds its observer as
`activation_post_process`, and two flags say whether it observes and whether it quantizes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.errors import ConfigError, RangeError
from pt2e_quant.core.recomputation import is_recomputing
from pt2e_quant.observers.observe_whole import give_size, observe_where, qparams_where
from pt2e_quant.observers.partial_wrapper import PartialWrapper
from pt2e_quant.observers.qschemes import PER_TENSOR, is_per_channel
from pt2e_quant.observers.static.moving_average import MovingAverageMinMaxObserver
from pt2e_quant.observers.training.fake_quantize_function import fake_quantize_tensor

_SHOWN = (
    "scale", "zero_point", "quant_min", "quant_max", "dtype", "qscheme", "ch_axis", "target_dtype",
    "granularity", "mapping_type", "zero_point_domain", "block_size",
)  # fmt: skip
"""The attributes of a fake-quantize that its repr shows, where it has them."""


_UNSEEN = {"min_val": torch.inf, "max_val": -torch.inf, "scale": 1.0, "zero_point": 0}
"""The values of an observer's statistics for channels without data."""


class FakeQuantizeBase(ABC, nn.Module):
    """A module that observes its input and gives back what quantization leaves of it."""

    fake_quant_enabled: Tensor
    observer_enabled: Tensor
    activation_post_process: Any
    """The observer."""

    def __init__(self) -> None:
        super().__init__()
        # Buffers, so that data parallel replicas agree; uint8, because NCCL has no bool.
        self.register_buffer("fake_quant_enabled", torch.tensor([1], dtype=torch.uint8))
        self.register_buffer("observer_enabled", torch.tensor([1], dtype=torch.uint8))

    @classmethod
    def with_args(cls, **kwargs: Any) -> PartialWrapper:
        """A constructor of this fake-quantize with some arguments given."""
        return PartialWrapper(partial(cls, **kwargs))

    @abstractmethod
    def forward(self, X: Tensor) -> Tensor:
        """Observe X and return it quantized and dequantized, as far as enabled."""

    @abstractmethod
    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The scale and zero_point that the statistics call for."""

    @property
    def is_observing(self) -> bool:
        """True if this forward pass gathers statistics: not one that is recomputed for backward.

        Reads a tensor, which `torch.compile` cannot branch on: see `updates_where`.
        """
        return bool(self.observer_enabled[0] == 1) and not is_recomputing()

    @property
    def seen(self) -> bool:
        """True if the observer has the data it needs."""
        return bool(getattr(self.activation_post_process, "seen", True))

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Quantize from now on, or not."""
        self.fake_quant_enabled[0] = int(enabled)

    def disable_fake_quant(self) -> None:
        """Hand the input on as it is from now on."""
        self.enable_fake_quant(False)

    def enable_observer(self, enabled: bool = True) -> None:
        """Gather statistics from now on, or not."""
        self.observer_enabled[0] = int(enabled)

    def disable_observer(self) -> None:
        """Keep the qparams as they are from now on."""
        self.enable_observer(False)

    def extra_repr(self) -> str:
        """Shown by print."""
        shown = {name: getattr(self, name) for name in _SHOWN if hasattr(self, name)}
        flags = (
            f"fake_quant_enabled={self.fake_quant_enabled}, "
            f"observer_enabled={self.observer_enabled}"
        )
        return ", ".join([flags, *(f"{name}={value}" for name, value in shown.items())])


class FakeQuantize(FakeQuantizeBase):
    """Fake-quantize by the qparams of an observer.

    Args:
        observer: makes the observer.
        quant_min: least integer used; the observer's own if None.
        quant_max: greatest integer used; the observer's own if None.
        is_dynamic: convert chooses qparams at run time.
        observer_kwargs: further arguments of the observer.

    Raises:
        ConfigError: the range is none, or does not fit in the dtype.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        observer: Callable[..., Any] = MovingAverageMinMaxObserver,
        quant_min: int | None = None,
        quant_max: int | None = None,
        is_dynamic: bool = False,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__()
        if quant_min is not None and quant_max is not None:
            _check_range(observer, observer_kwargs, quant_min, quant_max)
            observer_kwargs.update(quant_min=quant_min, quant_max=quant_max)
        made = observer(**observer_kwargs, is_dynamic=is_dynamic)
        self.activation_post_process = made
        self.quant_min = made.quant_min
        self.quant_max = made.quant_max
        self.is_dynamic = made.is_dynamic
        self.dtype = made.dtype
        self.qscheme = made.qscheme
        self.ch_axis = getattr(made, "ch_axis", -1)
        if not is_per_channel(self.qscheme) and self.qscheme not in PER_TENSOR:
            raise ConfigError(f"{type(self).__name__} has no qscheme {self.qscheme}")
        self.is_per_channel = is_per_channel(self.qscheme)
        is_float = self.qscheme == torch.per_channel_affine_float_qparams
        zero_point_dtype = torch.float32 if is_float else torch.int32
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("zero_point", torch.zeros(1, dtype=zero_point_dtype))

    def start_channels(self, channels: int) -> None:
        """Give all statistics their final size, so that the first batch resizes nothing.

        Copies that average, compiled graphs and other ranks then agree from the start.
        """
        observer = self.activation_post_process
        for owner in (observer, self):
            for name, value in _UNSEEN.items():
                held = getattr(owner, name, None)
                if held is not None and (owner is self or held.numel() == 0):
                    give_size(owner, **{name: (channels,)})
                    getattr(owner, name).fill_(value)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The scale and zero_point that the observer's statistics call for."""
        scale, zero_point = self.activation_post_process.calculate_qparams()
        return scale, zero_point

    def forward(self, X: Tensor) -> Tensor:
        """Observe X and return it quantized and dequantized, as far as enabled."""
        if torch.compiler.is_compiling():
            is_on = self.observer_enabled[0] == 1
            with updates_where(is_on, self):
                observe_where(self.activation_post_process, X.detach(), is_on)
                self._keep(*qparams_where(self.activation_post_process, is_on, self))
            return torch.where(self.fake_quant_enabled[0] == 1, self.quantized(X), X)
        if self.is_observing:
            self._observe(X)
        return X if self.fake_quant_enabled[0] != 1 else self.quantized(X)

    def _observe(self, X: Tensor) -> None:
        """Show X to the observer, and keep the qparams that it comes to."""
        self.activation_post_process(X.detach())
        self._keep(*self.calculate_qparams())

    def _keep(self, scale: Tensor, zero_point: Tensor) -> None:
        if self.scale.shape != scale.shape:
            give_size(self, scale=scale.shape, zero_point=zero_point.shape)
        self.scale.copy_(scale)
        self.zero_point.copy_(zero_point)

    def quantized(self, X: Tensor) -> Tensor:
        """X quantized and dequantized by the qparams that are kept."""
        axis = self.ch_axis if self.is_per_channel else None
        limits = self.quant_min, self.quant_max
        return fake_quantize_tensor(X, self.scale, self.zero_point, *limits, axis)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # One element until the first data: take the number of channels from the state.
        for name, buffer in (("scale", self.scale), ("zero_point", self.zero_point)):
            if isinstance(value := state_dict.get(prefix + name), Tensor):
                buffer.resize_(value.shape)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


@contextmanager
def updates_where(is_on: Tensor, module: nn.Module) -> Iterator[None]:
    """Undo what the block does to a module's buffers and parameters unless a flag is set.

    Compiled code cannot branch on the flag, so it computes the update and keeps one of the two.

    Args:
        is_on: the flag, one element.
        module: the one that they belong to.
    """
    # Found beforehand: a compiler does not list the modules of one that has got new tensors.
    parts = list(module.modules())
    with torch.no_grad():
        before = [{name: held.clone() for name, held in _held(part)} for part in parts]
        yield
        for part, earlier in zip(parts, before, strict=True):
            for name, held in _held(part):
                old = earlier.get(name, held)  # what the first data made stays: it tells a shape
                if held.shape != old.shape:  # the first data gave it its size
                    old = torch.full_like(held, _UNSEEN.get(name, 0))
                held.copy_(torch.where(is_on, held, old))


def _held(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors of one module, without those of its parts."""
    held = [*module._buffers.items(), *module._parameters.items()]
    return [(name, tensor) for name, tensor in held if tensor is not None]


def _check_range(
    observer: Callable[..., Any], observer_kwargs: dict[str, Any], quant_min: int, quant_max: int
) -> None:
    given = getattr(getattr(observer, "p", None), "keywords", {})
    dtype = given.get("dtype", observer_kwargs.get("dtype", torch.quint8))
    if not info(dtype).holds(quant_min, quant_max):
        raise RangeError(
            f"quant_min {quant_min} .. quant_max {quant_max} is no range within {dtype}"
        )


def _as_fake_quantize(mod: Any) -> Any:
    """The module if it is a fake-quantize, ours or another library's, else None."""
    is_one = hasattr(mod, "fake_quant_enabled") and hasattr(mod, "disable_observer")
    return mod if is_one else None


def enable_fake_quant(mod: nn.Module) -> None:
    """Let a fake-quantize quantize; for `model.apply`, other modules stay as they are."""
    if (found := _as_fake_quantize(mod)) is not None:
        found.enable_fake_quant()


def disable_fake_quant(mod: nn.Module) -> None:
    """Let a fake-quantize hand its input on; for `model.apply`, other modules stay as they are."""
    if (found := _as_fake_quantize(mod)) is not None:
        found.disable_fake_quant()


def enable_observer(mod: nn.Module) -> None:
    """Let a fake-quantize gather statistics; for `model.apply`."""
    if (found := _as_fake_quantize(mod)) is not None:
        found.enable_observer()


def disable_observer(mod: nn.Module) -> None:
    """Let a fake-quantize keep its qparams; for `model.apply`."""
    if (found := _as_fake_quantize(mod)) is not None:
        found.disable_observer()
