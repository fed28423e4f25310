"""Make the observer of a spec, also of specs and constructors of other libraries."""

import copy
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from torch import nn
from torch.fx import Node

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.errors import AnnotationError, ConfigError
from pt2e_quant.core.specs import SpecKind, kind_of
from pt2e_quant.flow.annotate.groups import Group
from pt2e_quant.observers.partial_wrapper import given_argument
from pt2e_quant.observers.static.derived import DerivedObserverOrFakeQuantize
from pt2e_quant.observers.static.fixed import FixedQParamsObserver
from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver
from pt2e_quant.observers.training.fixed_fake_quantize import FixedQParamsFakeQuantize
from pt2e_quant.observers.training.trained_qparams import TrainedSource

_TWINS = (MinMaxObserver, PerChannelMinMaxObserver)
"""Observers that are made from another of the same spec."""

_DERIVED = ("dtype", "derive_qparams_fn", "quant_min", "quant_max", "qscheme", "ch_axis")


def make_observers(
    groups: Iterable[Group],
    known: Mapping[int, nn.Module],
    *,
    is_qat: bool = False,
    by_statistics: bool = False,
) -> dict[int, nn.Module]:
    """The observers of groups by their number, sources before what derives from them.

    Args:
        groups: in any order, also several times.
        known: observers that are there already, which the result has too.
        is_qat: see `make_observer`.
        by_statistics: see `make_observer`.

    Raises:
        AnnotationError: a constructor refuses, or specs derive from each other in a circle.
    """
    made = dict(known)
    by_index = {g.index: g for g in groups if g.index not in known}
    waiting = [by_index[index] for index in sorted(by_index)]
    first: dict[object, Any] = {}
    while waiting:
        ready = [g for g in waiting if all(s.index in made for s in g.sources)]
        if not ready:
            place = waiting[0].places[0]
            raise AnnotationError(
                "derived specs derive from each other in a circle",
                node=place if isinstance(place, Node) else place[1],
            )
        for group in ready:
            if getattr(group.spec, "observer_or_fake_quant_ctr", None) not in _TWINS:
                made[group.index] = make_observer(
                    group, made, is_qat=is_qat, by_statistics=by_statistics
                )
                continue
            key = spec_key(group.spec)
            twin = first.get(key)
            made[group.index] = twin.twin() if twin is not None else make_observer(group, made)
            first.setdefault(key, made[group.index])
        waiting = [g for g in waiting if g.index not in made]
    return made


def spec_key(spec: object) -> object:
    """Equal for specs that make equal observers."""
    try:
        hash(spec)
    except TypeError:
        return id(spec)
    return spec


def make_observer(
    group: Group,
    made: dict[int, nn.Module],
    *,
    is_qat: bool = False,
    by_statistics: bool = False,
) -> nn.Module:
    """The observer of a group, or its fake-quantize if the spec's constructor makes one.

    Args:
        group: the places that share it, and their spec.
        made: the observers of the groups it derives from.
        is_qat: fixed and derived qparams fake-quantize.
        by_statistics: derived qparams are those of the sources' statistics, and fake-quantize
            nothing, as in torchao; otherwise of the qparams that the sources train with.

    Raises:
        AnnotationError: the spec's constructor refuses, naming node and spec.
    """
    spec = group.spec
    kind = kind_of(spec)
    if kind is SpecKind.DERIVED:
        sources: list[Any] = [made[source.index] for source in group.sources]
        trains = is_qat and not by_statistics
        if trains:
            sources = [TrainedSource(source) for source in sources]
        derived = {name: getattr(spec, name, None) for name in _DERIVED}
        observer = _call(DerivedObserverOrFakeQuantize, {"obs_or_fqs": sources, **derived}, group)
        if isinstance(observer, DerivedObserverOrFakeQuantize):
            observer.fake_quantizes = trains
        return observer
    keywords = _keywords(spec)
    if kind is SpecKind.FIXED:
        limits = info(spec.dtype)
        missing = {"quant_min": limits.quant_min, "quant_max": limits.quant_max}
        fixed = missing | {k: v for k, v in keywords.items() if v is not None}
        if is_qat:
            constructor = FixedQParamsObserver.with_args(**fixed)
            return _call(FixedQParamsFakeQuantize, {"observer": constructor}, group)
        return _call(FixedQParamsObserver, fixed, group)
    constructor = keywords.pop("observer_or_fake_quant_ctr")
    # Where the spec names no axis (Core ML's), the constructor has one of its own.
    if keywords.get("ch_axis") is None or not _takes_axis(constructor):
        keywords.pop("ch_axis", None)
    if hasattr(constructor, "with_args"):
        return _call(constructor.with_args(**keywords), {}, group)
    return _call(constructor, keywords, group)


def _keywords(spec: Any) -> dict[str, Any]:
    # Not dataclasses.asdict, which would copy tensors and constructors in nested fields.
    return {f.name: copy.copy(getattr(spec, f.name)) for f in fields(spec)}


def _takes_axis(constructor: Any) -> bool:
    """True if a constructor takes ch_axis; PT2E hands it to those named per channel only.

    A fake-quantize hands it on to its observer. Upstream keeps it from every fake-quantize, which
    trains a transposed convolution's weight along its inputs.
    """
    made = _class_of(constructor)
    observer = given_argument(constructor, "observer")
    if observer is not None:
        kind = _class_of(observer)
        return isinstance(kind, type) and "ch_axis" in inspect.signature(kind).parameters
    return "PerChannel" in getattr(made, "__name__", "")


def _class_of(constructor: Any) -> Any:
    """The class behind the arguments that a constructor was given beforehand."""
    while not isinstance(constructor, type):
        inner = getattr(constructor, "p", None) or getattr(constructor, "func", None)
        if inner is None:
            break
        constructor = inner
    return constructor


def _class_name(constructor: Any) -> str:
    made = _class_of(constructor)
    return str(getattr(made, "__name__", made))


def _call(constructor: Any, keywords: dict[str, Any], group: Group) -> nn.Module:
    place = group.places[0] if group.places else None  # none: the spec of a tensor of no graph
    node = place if isinstance(place, Node) or place is None else place[1]
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
            f"{_class_name(constructor)} made a {type(made).__name__}, not a module",
            node=node,
            fix="give the spec a class derived from pt2e_quant.pt2e.observer.ObserverBase",
        )
    return made
