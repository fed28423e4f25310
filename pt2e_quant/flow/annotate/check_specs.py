"""Reject annotations that contradict themselves, and graphs without any; each error has a fix."""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2e_quant.core.dtypes import DTYPES
from pt2e_quant.core.errors import AnnotationError, Pt2eQuantWarning
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.specs import Q_ANNOTATION_KEY, EdgeOrNode, SpecKind, kind_of
from pt2e_quant.flow.annotate.groups import Group
from pt2e_quant.graph.ops import aten
from pt2e_quant.observers.qschemes import PER_CHANNEL

_LIBRARIES = ("torchao", "torch.ao")
_ASKED = (
    "dtype", "quant_min", "quant_max", "qscheme", "ch_axis", "is_dynamic", "scale", "zero_point",
    "edge_or_node", "derived_from",
)  # fmt: skip


# A node annotated twice


class _Watched(dict[Any, Any]):
    """Metadata of one node that remembers the annotations it has had."""

    def __init__(self, given: Mapping[Any, Any]) -> None:
        super().__init__(given)
        self.annotations: list[Any] = []

    def __setitem__(self, key: Any, value: Any) -> None:
        if key == Q_ANNOTATION_KEY:
            self.annotations.append(value)
        super().__setitem__(key, value)


@contextmanager
def watch_annotations(gm: GraphModule, *, strict: bool) -> Iterator[None]:
    """Find nodes whose annotation is replaced by another that asks for something else.

    What the second leaves out becomes a note of the provenance.

    Raises:
        AnnotationError: the second annotation contradicts the first; a warning if not strict.
    """
    for node in gm.graph.nodes:
        node.meta = _Watched(node.meta)
    yield
    for node in gm.graph.nodes:
        watched, node.meta = node.meta, dict(node.meta)
        if isinstance(watched, _Watched):
            for before, after in zip(watched.annotations, watched.annotations[1:], strict=False):
                _compare(gm, node, before, after, strict)


def _compare(gm: GraphModule, node: Node, before: Any, after: Any, strict: bool) -> None:
    kept = _specs(after)
    for where, spec in _specs(before).items():
        if where not in kept:
            # Core ML's quantizer does so at pools; torchao's flow takes the last as well.
            text = f"{node.name}: annotated twice, the second annotation leaves out {where}"
            provenance_of(gm).notes.append(text)
        elif not _is_same(kept[where], spec):
            error = AnnotationError(
                f"this node was annotated twice: {where} was {spec}, "
                f"the second annotation says {kept[where]}",
                node=node,
                fix="annotate a node once; a Quantizer asks `_annotated` before it writes",
            )
            _say(error, strict)
            return


def _is_same(a: Any, b: Any) -> bool:
    """True if two specs ask for the same; constructors are made anew each time and do not count."""
    if a is b:
        return True
    return kind_of(a) is kind_of(b) and all(
        getattr(a, name, None) == getattr(b, name, None) for name in _ASKED
    )


def _specs(annotation: Any) -> dict[str, Any]:
    inputs = getattr(annotation, "input_qspec_map", {})
    found = {f"input {source}": spec for source, spec in inputs.items() if spec is not None}
    output = getattr(annotation, "output_qspec", None)
    return found if output is None else found | {"output": output}


def _say(error: AnnotationError, strict: bool) -> None:
    if strict:
        raise error
    warnings.warn(str(error), Pt2eQuantWarning, stacklevel=2)


# Single annotations


def check_annotations(gm: GraphModule) -> None:
    """Refuse ranges that their types do not have, and references to what is not in the graph.

    Raises:
        AnnotationError: naming the node, the spec and the place.
    """
    nodes = set(gm.graph.nodes)
    for node in gm.graph.nodes:
        for where, spec in _specs(node.meta.get(Q_ANNOTATION_KEY)).items():
            _check_range(node, where, spec)
            for verb, place in _references(spec):
                problem = _missing(place, nodes)
                if problem is not None:
                    raise AnnotationError(
                        f"{where} {verb} {_shown(place)}, {problem} ({type(spec).__name__})",
                        node=node,
                        fix="name a node of this graph, or an edge (producer, consumer) of it",
                    )


def _references(spec: Any) -> Iterable[tuple[str, Any]]:
    kind = kind_of(spec)
    if kind is SpecKind.SHARED:
        return [("shares with", spec.edge_or_node)]
    if kind is SpecKind.DERIVED:
        return [("derives from", place) for place in spec.derived_from]
    return []


def _missing(place: Any, nodes: set[Node]) -> str | None:
    """Why a place is none of the graph's, None if it is."""
    parts = place if isinstance(place, tuple) else (place,)
    if not all(isinstance(part, Node) for part in parts) or len(parts) > 2:
        return "which is neither a node nor an edge"
    for part in parts:
        if part not in nodes:
            return f'and "{part.name}" does not exist in this graph'
    if len(parts) == 2 and parts[0] not in parts[1].all_input_nodes:
        return f'but "{parts[1].name}" does not read "{parts[0].name}"'
    return None


def _shown(place: Any) -> str:
    if isinstance(place, tuple) and all(isinstance(p, Node) for p in place):
        return '"' + " -> ".join(p.name for p in place) + '"'
    return f'"{place.name}"' if isinstance(place, Node) else repr(place)


# Axes and sources


def check_groups(groups: Mapping[EdgeOrNode, Group]) -> None:
    """Refuse specs that their tensors or types cannot have.

    Raises:
        AnnotationError: naming the node, the spec and the fix.
    """
    alive = {id(group) for group in groups.values()}
    for place, group in groups.items():
        node = place if isinstance(place, Node) else place[1]
        _check_axis(node, place, group.spec)
        for source in group.sources:
            if id(source) not in alive:
                raise AnnotationError(
                    f"{group.spec} derives from a tensor that is not observed: it holds integers, "
                    f"an attention mask, or is a buffer that this graph writes",
                    node=node,
                    fix="derive from observed edges only",
                )


def _check_range(node: Node, where: str, spec: Any) -> None:
    limits = DTYPES.get(getattr(spec, "dtype", None))  # type: ignore[arg-type]  # None is no key of it
    low, high = getattr(spec, "quant_min", None), getattr(spec, "quant_max", None)
    if limits is None or low is None or high is None:
        return
    if not limits.holds(int(low), int(high)):
        raise AnnotationError(
            f"{where}: quant_min {low} .. quant_max {high} is no range within {spec.dtype} "
            f"({limits.quant_min} .. {limits.quant_max}) in {spec}",
            node=node,
            fix=f"quant_min and quant_max within {limits.quant_min} .. {limits.quant_max}",
        )


def _check_axis(node: Node, place: EdgeOrNode, spec: Any) -> None:
    axis = getattr(spec, "ch_axis", None)
    source = place if isinstance(place, Node) else place[0]
    value = source.meta.get("val")
    if axis is None or getattr(spec, "qscheme", None) not in PER_CHANNEL:
        return
    if isinstance(value, Tensor) and not -value.dim() <= axis < value.dim():
        raise AnnotationError(
            f'"{source.name}" has {value.dim()} dimensions, its channel axis is {axis} in {spec}',
            node=node,
            fix=f"ch_axis from 0 to {value.dim() - 1}",
        )


# Observers


def check_observers(
    groups: Mapping[EdgeOrNode, Group], observers: Mapping[int, nn.Module], *, strict: bool
) -> None:
    """Refuse modules that are no observers, and observers of two generations in one graph.

    Raises:
        AnnotationError: naming the node, the spec and the fix; of two generations a warning if not
            strict.
    """
    seen: dict[str, tuple[Node, Any]] = {}
    for place, group in groups.items():
        observer = observers[group.index]
        node = place if isinstance(place, Node) else place[1]
        if not hasattr(observer, "calculate_qparams"):
            raise AnnotationError(
                f"{type(observer).__name__} is no observer: it has no calculate_qparams "
                f"(from {group.spec})",
                node=node,
                fix="derive it from pt2e_quant.pt2e.observer.ObserverBase",
            )
        library = _library(type(observer).__mro__)
        if library:
            seen.setdefault(library, (node, observer))
    if len(seen) > 1:
        (node, first), (other, second) = seen["torchao"], seen["torch.ao"]
        _say(
            AnnotationError(
                f"observers of torchao ({type(first).__name__} at {node.name}) and of torch.ao "
                f"({type(second).__name__} at {other.name}) are mixed in one graph",
                node=other,
                fix="take all of them from torchao.quantization.pt2e, or from pt2e_quant.pt2e",
            ),
            strict,
        )


@cache
def _library(kinds: tuple[type, ...]) -> str:
    """The library, torch or torchao, that defines an observer's class or one of its bases."""
    for kind in kinds:
        for name in _LIBRARIES:
            if kind.__module__.startswith(f"{name}."):
                return name
    return ""


_GENERAL_FIX = (
    "choose a recipe or scheme by the reasons above; docs/schemes.md has the nearest that each "
    "backend runs"
)
_DECOMPOSED_FIX = "prepare what torch.export.export gives, before run_decompositions()"


def nothing_quantized(gm: GraphModule) -> AnnotationError:
    """The error for a graph in which nothing was annotated.

    It counts the reasons, and names the node with the largest constants and the commonest fix.
    """
    records = provenance_of(gm).floats
    reasons = Counter(record.reason for record in records).most_common(8)
    listed = "\n".join(f"    {count} x {reason}" for reason, count in reasons)
    largest = max((r for r in records if r.size), key=lambda record: record.size, default=None)
    named = (n for n in gm.graph.nodes if largest is not None and n.name == largest.node)
    found = Counter(record.fix for record in records if record.fix)
    fixes = [fix for fix, _ in found.most_common(1)]
    if any(n.target is aten.convolution.default for n in gm.graph.nodes):
        fixes = [_DECOMPOSED_FIX]
    return AnnotationError(
        "no tensor of this graph is to be quantized" + (":\n" + listed if listed else ""),
        node=next(named, None),
        fix="; or ".join([*fixes, _GENERAL_FIX]),
    )
