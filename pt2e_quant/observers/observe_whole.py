"""Observers that look at values, as operators of a compiled graph.

A compiler can follow neither a histogram that grows with its data nor a search in it. In compiled
code such an observer is two operators, which run what it does in eager mode: one that gathers, one
that finds qparams. Both take a flag, as compiled code cannot branch on one.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from pt2e_quant.core.errors import CalibrationError
from pt2e_quant.core.recomputation import is_recomputing
from pt2e_quant.observers.base import UniformQuantizationObserverBase

_OBSERVERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The observers of compiled graphs by id, which a graph holds as a number under a guard."""

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "observe_whole(Tensor x, Tensor is_on, Tensor(a!)[] statistics, int observer) -> ()"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "observed_qparams(Tensor is_on, Tensor[] statistics, int observer) -> (Tensor, Tensor)"
)


@contextmanager
def _with_statistics(observer: nn.Module, statistics: list[Tensor]) -> Iterator[None]:
    """Let an observer read and write these tensors: a compiled graph's, which may be copies."""
    places = [
        (module, name)
        for module in observer.modules()
        for name, held in module._buffers.items()
        if held is not None
    ]
    own = [module._buffers[name] for module, name in places]
    shapes = [given.shape for given in statistics]
    try:
        for (module, name), given in zip(places, statistics, strict=True):
            module._buffers[name] = given
        yield
        for (module, name), given, shape in zip(places, statistics, shapes, strict=True):
            found = module._buffers[name]
            if found is None or found.shape != shape:
                raise CalibrationError(
                    f'"{name}" of {type(observer).__name__} gets its size from the first batch, '
                    "which compiled code cannot give it",
                    fix="run one batch before torch.compile",
                )
            if found is not given:
                given.copy_(found)
    finally:
        for (module, name), held in zip(places, own, strict=True):
            module._buffers[name] = held


def _observe(x: Tensor, is_on: Tensor, statistics: list[Tensor], observer: int) -> None:
    if bool(is_on) and not is_recomputing():
        found = _OBSERVERS[observer]
        with _with_statistics(found, statistics):
            found(x)


def _fake_observe(x: Tensor, is_on: Tensor, statistics: list[Tensor], observer: int) -> None:
    return


def _qparams(is_on: Tensor, statistics: list[Tensor], observer: int) -> tuple[Tensor, Tensor]:
    scale, zero_point = _fake_qparams(is_on, statistics, observer)
    scale.fill_(1.0)
    zero_point.zero_()
    if bool(is_on):
        found = _OBSERVERS[observer]
        with _with_statistics(found, [held.clone() for held in statistics]):
            calculated = found.calculate_qparams()
        scale.copy_(calculated[0])
        zero_point.copy_(calculated[1])
    return scale, zero_point


def _fake_qparams(is_on: Tensor, statistics: list[Tensor], observer: int) -> tuple[Tensor, Tensor]:
    device = statistics[0].device
    scale = torch.empty(1, dtype=torch.float32, device=device)
    return scale, torch.empty(1, dtype=torch.int32, device=device)


for _name, _run, _fake in (
    ("observe_whole", _observe, _fake_observe),
    ("observed_qparams", _qparams, _fake_qparams),
):
    torch.library.impl(_LIBRARY, _name, "CompositeExplicitAutograd")(_run)
    torch.library.register_fake(f"pt2e_quant::{_name}", lib=_LIBRARY)(_fake)


def _remember(observer: nn.Module) -> int:
    """Let operators find an observer; the compiler calls it once, when it traces."""
    _OBSERVERS[id(observer)] = observer
    return id(observer)


# What torch.compiler.assume_constant_result sets; that would import the compiler with this file.
_remember._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_traceable(observer: Any) -> bool:
    """True if a compiler can follow an observer; those of other packages are taken to be so."""
    return bool(getattr(observer, "is_traceable", True))


def observe_where(observer: nn.Module, x: Tensor, is_on: Tensor | bool) -> None:
    """Show x to an observer in compiled code.

    Args:
        observer: any; one that can be traced looks at x whatever the flag, see `updates_where`.
        x: float, detached.
        is_on: whether to, one element.
    """
    if is_traceable(observer):
        observer(x)
        return
    _remember(observer)
    statistics = list(observer.buffers())
    torch.ops.pt2e_quant.observe_whole.default(
        x, _flag(is_on, statistics), statistics, id(observer)
    )


def qparams_where(observer: Any, is_on: Tensor | bool, owner: Any = None) -> tuple[Tensor, Tensor]:
    """The qparams of an observer in compiled code.

    Args:
        observer: any; one that compilers cannot trace gathers per tensor.
        is_on: whether they are of use, one element; else they may be scale 1 and zero_point 0.
        owner: the fake-quantize to ask in the observer's place, where it can be traced.

    Returns:
        Scale and zero_point: [1], or as the observer has them.
    """
    if is_traceable(observer):
        scale, zero_point = (observer if owner is None else owner).calculate_qparams()
        return scale, zero_point
    _remember(observer)
    statistics = list(observer.buffers())
    scale, zero_point = torch.ops.pt2e_quant.observed_qparams.default(
        _flag(is_on, statistics), statistics, id(observer)
    )
    return scale, zero_point


def give_size(module: nn.Module, **shapes: tuple[int, ...] | torch.Size) -> None:
    """Give buffers their size at the first data, without values.

    A compiler takes new tensors in their place, as it cannot follow a tensor that is resized.

    Args:
        module: their owner.
        shapes: of each buffer's name.
    """
    for name, shape in shapes.items():
        held = module._buffers[name]
        assert held is not None
        if torch.compiler.is_compiling():
            setattr(module, name, held.new_empty(shape))
        else:
            held.resize_(shape)


def _flag(is_on: Tensor | bool, statistics: list[Tensor]) -> Tensor:
    if isinstance(is_on, Tensor):
        return is_on
    return torch.full((), is_on, device=statistics[0].device)


class WholeObserver(UniformQuantizationObserverBase):
    """An observer by code that a compiler cannot follow."""

    is_traceable = False

    def forward(self, x_orig: Tensor) -> Tensor:
        """Add x_orig to the statistics; returns x_orig.

        Raises:
            NonFinite: if x_orig holds NaN or infinity.
        """
        if torch.compiler.is_compiling():
            observe_where(self, x_orig.detach(), True)
        else:
            self.add(x_orig)
        return x_orig

    @abstractmethod
    def add(self, x_orig: Tensor) -> None:
        """Add a tensor to the statistics."""

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero_point of the range that fits the statistics, both [1]."""
        if torch.compiler.is_compiling():
            return qparams_where(self, True)
        return self.find_qparams()

    @abstractmethod
    def find_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero_point of the range that fits the statistics, both [1]."""
