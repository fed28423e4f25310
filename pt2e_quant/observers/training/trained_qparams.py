"""The qparams that a fake-quantize trains with, which are those to convert by.

`calculate_qparams` gives what the observer's statistics call for, as in torch.ao and torchao. That
is something else after the observer was switched off or a scale was loaded, and always for
torch's fused operator, whose symmetric scale for -127 .. 127 is max(-min / 128, max / 127).
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pt2e_quant.core.qparams import QParams
from pt2e_quant.observers.observe_whole import qparams_where
from pt2e_quant.observers.qschemes import PER_CHANNEL


def is_fake_quantize(module: object) -> bool:
    """True if a module is a fake-quantize with an observer inside, ours or another library's."""
    return hasattr(module, "fake_quant_enabled") and hasattr(module, "activation_post_process")


def qparams_of(observer: Any, *, by_statistics: bool = False) -> QParams:
    """The qparams that an observer has come to.

    Args:
        observer: an observer or fake-quantize.
        by_statistics: of a fake-quantize, those that its statistics call for instead of those
            that it trained with.
    """
    with warnings.catch_warnings():
        # Of observers without data, which convert has already refused or warned of.
        warnings.simplefilter("ignore")
        found = observer.calculate_qparams() if by_statistics else trained_qparams(observer)
        scale, zero_point = found
    qscheme = getattr(observer, "qscheme", None)
    is_float = qscheme == torch.per_channel_affine_float_qparams
    group_size = getattr(observer, "group_size", None)
    is_per_channel = qscheme in PER_CHANNEL and group_size is None
    shape = (-1,) if group_size is None else tuple(scale.shape)
    limits = None if observer.quant_min is not None else torch.iinfo(observer.dtype)
    return QParams(
        scale=scale.detach().to(torch.float32).reshape(shape),
        zero_point=zero_point.detach()
        .to(torch.float32 if is_float else torch.int32)
        .reshape(shape),
        quant_min=int(observer.quant_min if limits is None else limits.min),
        quant_max=int(observer.quant_max if limits is None else limits.max),
        dtype=observer.dtype,
        axis=int(observer.ch_axis or 0) if is_per_channel else None,
        group_size=group_size,
    )


def trained_qparams(observer: Any) -> tuple[Tensor, Tensor]:
    """(scale, zero_point) by which a fake-quantize would quantize next, with its observer off.

    Of an observer, and of a fake-quantize that is off, those that the statistics call for.
    """
    scale = getattr(observer, "scale", None)
    has_buffers = isinstance(scale, Tensor) and not isinstance(scale, nn.Parameter)
    is_kept = is_fake_quantize(observer) and has_buffers
    is_compiling = torch.compiler.is_compiling()
    if not is_kept or (not is_compiling and not observer.fake_quant_enabled[0]):
        calculated: tuple[Tensor, Tensor] = observer.calculate_qparams()
        return calculated
    kept: tuple[Tensor, Tensor] = observer.scale, observer.zero_point
    if "FusedMovingAvgObsFakeQuantize" in _class_names(observer):
        kept = _fused_qparams(observer)
    if not is_compiling:
        return kept
    # Compiled code cannot branch on the flag: it computes both.
    is_kept_used = observer.fake_quant_enabled[0] == 1
    other = qparams_where(observer.activation_post_process, ~is_kept_used, observer)
    return where(is_kept_used, kept, other)


def where(
    condition: Tensor, chosen: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """One of two pairs of qparams, without a branch."""
    scale, zero_point = (torch.where(condition, a, b) for a, b in zip(chosen, other, strict=True))
    return scale, zero_point


def live_qparams(fake_quantize: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, zero_point, flag) of the last forward pass; the flag is 1 where it quantized.

    Tensors only, and nothing is computed from statistics: for use while a graph runs.
    """
    scale, zero_point = fake_quantize.scale, fake_quantize.zero_point
    if isinstance(zero_point, nn.Parameter):
        limits = fake_quantize.quant_min, fake_quantize.quant_max
        zero_point = zero_point.detach().round().clamp(*limits)
    return scale.detach(), zero_point, fake_quantize.fake_quant_enabled


def _class_names(module: object) -> Iterator[str]:
    return (kind.__name__ for kind in type(module).__mro__)


def _fused_qparams(fake_quantize: Any) -> tuple[Tensor, Tensor]:
    """Return the qparams that torch's fused operator computes from the running range."""
    observer = fake_quantize.activation_post_process
    low, high = observer.min_val.detach(), observer.max_val.detach()
    kept: tuple[Tensor, Tensor] = fake_quantize.scale, fake_quantize.zero_point
    is_compiling = torch.compiler.is_compiling()
    has_data = (low <= high).all()
    if low.numel() == 0 or (not is_compiling and not bool(has_data)):
        return kept  # it has not computed any
    scale, zero_point = fake_quantize.scale.clone(), fake_quantize.zero_point.clone()
    with torch.no_grad():
        torch.fused_moving_avg_obs_fake_quant(
            torch.zeros_like(low).reshape(-1, 1),
            observer_on=torch.zeros_like(fake_quantize.observer_enabled, dtype=torch.long),
            fake_quant_on=torch.ones_like(fake_quantize.fake_quant_enabled, dtype=torch.long),
            running_min=low.clone(),
            running_max=high.clone(),
            scale=scale,
            zero_point=zero_point,
            averaging_const=observer.averaging_constant,
            quant_min=fake_quantize.quant_min,
            quant_max=fake_quantize.quant_max,
            ch_axis=0,
            per_row_fake_quant=fake_quantize.is_per_channel,
            symmetric_quant=fake_quantize.is_symmetric_quant,
        )
    return where(has_data, (scale, zero_point), kept) if is_compiling else (scale, zero_point)


@dataclass(frozen=True, eq=False)
class TrainedSource:
    """A fake-quantize for functions that derive qparams from others': those it trains with.

    Args:
        source: the fake-quantize, whose other attributes can be read here too.
    """

    source: nn.Module

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """See `trained_qparams`."""
        return trained_qparams(self.source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)
