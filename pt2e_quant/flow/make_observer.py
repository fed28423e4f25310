"""Spec to observer: ours, or another library's, built as that library builds it."""

import copy
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from pt2e_quant.core.errors import AnnotationError, ConfigError
from pt2e_quant.core.specs import SpecKind, kind_of
from pt2e_quant.flow.groups import Group
from pt2e_quant.observers.fixed import FixedQParamsObserver

__all__ = ["DerivedObserver", "make_observer"]


class DerivedObserver(nn.Module):
    """The stand-in observer of a derived spec: it sees nothing, its sources do.

    Args:
        sources: the observers that the spec reads, in the spec's order.
        spec: the derived spec.
    """

    def __init__(self, sources: list[nn.Module], spec: Any) -> None:
        super().__init__()
        # Kept out of the module tree: they are already there under their own names.
        self.__dict__["sources"] = list(sources)
        self.derive_qparams_fn = spec.derive_qparams_fn
        self.dtype = spec.dtype
        self.quant_min = spec.quant_min
        self.quant_max = spec.quant_max
        self.qscheme = spec.qscheme
        self.ch_axis = spec.ch_axis
        self.is_dynamic = False

    def forward(self, x: Tensor) -> Tensor:
        """The input, unchanged."""
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """(scale, zero_point) as the spec's function derives them."""
        scale, zero_point = self.derive_qparams_fn(self.__dict__["sources"])
        return scale, zero_point

    @property
    def seen(self) -> bool:
        """Whether the sources have seen data."""
        return all(getattr(s, "seen", True) for s in self.__dict__["sources"])


def make_observer(group: Group, made: dict[int, nn.Module]) -> nn.Module:
    """The observer of a group; `made` holds those of the groups it derives from.

    Raises:
        AnnotationError: the spec's constructor refuses, naming node and spec.
    """
    spec = group.spec
    kind = kind_of(spec)
    if kind is SpecKind.DERIVED:
        return DerivedObserver([made[source.index] for source in group.sources], spec)
    keywords = _keywords(spec)
    if kind is SpecKind.FIXED:
        return _call(FixedQParamsObserver, keywords, group)
    constructor = keywords.pop("observer_or_fake_quant_ctr")
    # PT2E hands ch_axis to constructors named per channel only; others do not take it.
    if "PerChannel" not in _class_name(constructor):
        keywords.pop("ch_axis", None)
    if hasattr(constructor, "with_args"):
        return _call(constructor.with_args(**keywords), {}, group)
    return _call(constructor, keywords, group)


def _keywords(spec: Any) -> dict[str, Any]:
    # Not dataclasses.asdict, which would copy tensors and constructors in nested fields.
    return {f.name: copy.copy(getattr(spec, f.name)) for f in fields(spec)}


def _class_name(constructor: Any) -> str:
    while not isinstance(constructor, type):
        inner = getattr(constructor, "p", None) or getattr(constructor, "func", None)
        if inner is None:
            break
        constructor = inner
    return str(getattr(constructor, "__name__", constructor))


def _call(constructor: Any, keywords: dict[str, Any], group: Group) -> nn.Module:
    place = group.places[0]
    node = place if isinstance(place, torch.fx.Node) else place[1]
    try:
        made = constructor(**keywords)
    except (TypeError, ValueError, AssertionError, ConfigError) as error:
        raise AnnotationError(
            f"{_class_name(constructor)} cannot be made from {group.spec}: {error}",
            node=node,
            fix="give the spec an observer that takes its fields",
        ) from error
    if not isinstance(made, nn.Module):
        raise AnnotationError(
            f"{_class_name(constructor)} made a {type(made).__name__}, not a module", node=node
        )
    return made
