"""Import the qparams of a JSON file into a prepared program."""

import copy
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.dtypes import DTYPES, info
from pt2e_quant.core.errors import ArtifactError, ConfigError, near
from pt2e_quant.flow.convert.observed_qparams import infos_of_split
from pt2e_quant.flow.encodings.aimet import read_dicts, read_lists
from pt2e_quant.flow.encodings.encoding import Encoding
from pt2e_quant.flow.encodings.export_file import width_of
from pt2e_quant.flow.encodings.own import FORMAT, read_own
from pt2e_quant.flow.prepare.prepared import (
    PreparedState,
    observers_of,
    own_observers,
    prepared_graphs,
    prepared_state,
)
from pt2e_quant.graph.subgraphs import BODY_KEY
from pt2e_quant.observers.qschemes import PER_CHANNEL, SYMMETRIC
from pt2e_quant.observers.static.fixed import ImportedQParams
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph
from pt2e_quant.passes.algorithms.gathered import Gathered
from pt2e_quant.passes.algorithms.own_ranges import SPLIT_KEY, shared_ranges, split_range

_DTYPES = frozenset({*DTYPES, torch.qint8, torch.quint8, torch.qint32})
"""The dtypes that an encoding can express."""


def import_encodings(
    prepared: GraphModule, path: str | Path, *, names: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Give tensors of a prepared program the qparams of a JSON file, of any of the formats.

    Their observers are replaced: what data runs through afterwards changes them no more. Tensors
    that the file does not name are observed as before; a bias that is derived from its input and
    weight stays so.

    Args:
        prepared: of `prepare_pt2e`.
        path: of the file.
        names: for tensors that have another name in the file: its name to the one here.

    Returns:
        The names of the tensors that have the file's qparams.

    Raises:
        ConfigError: the program is not prepared, or prepared for training.
        ArtifactError: the file cannot be read, or names a tensor that is not observed here (near
            names are offered), that has another width, another number of scales, or that two
            entries of the file disagree about.
    """
    if prepared_state(prepared).is_qat:
        raise ConfigError(
            "this program is prepared for training", fix="import into one of prepare_pt2e"
        )
    encodings = [((names or {}).get(e.name, e.name), e) for e in _read(Path(path))]
    _split_ranges(prepared, dict(encodings))
    places = _places(prepared)
    fixed: dict[int, tuple[Encoding, ImportedQParams | None]] = {}
    done = []
    for name, encoding in encodings:
        if name not in places:
            raise ArtifactError(
                f'{path} names a tensor "{name}" that is not observed here: {near(name, places)}',
                fix="import_encodings(prepared, path, names={file_name: name})",
            )
        for place in places[name]:
            _take(fixed, place, name, encoding)
        if any(fixed[id(place.observer)][1] is not None for place in places[name]):
            done.append(name)
    _replace(prepared, {key: made for key, (_, made) in fixed.items() if made is not None})
    return tuple(done)


def _read(path: Path) -> list[Encoding]:
    try:
        data = json.loads(path.read_text())
        if data.get("format") == FORMAT:
            return read_own(data)
        version = tuple(int(part) for part in str(data["version"]).split("."))
        if version[0] > 1:
            raise ArtifactError(
                f"{path} is of version {data['version']}, expected at most 1.0.0",
                fix='export it with encoding_version="1.0.0"',
            )
        return read_lists(data) if version[0] == 1 else read_dicts(data)
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ArtifactError(
            f"{path} is no file of encodings: {type(error).__name__}: {error}",
            fix='a JSON with "version", "activation_encodings" and "param_encodings"',
        ) from error


@dataclass(frozen=True, slots=True)
class _Place:
    """One observer of a tensor, and the tensor's shape; a dynamic size is None."""

    observer: Any
    shape: tuple[int | None, ...]


def _split_ranges(prepared: GraphModule, encodings: Mapping[str, Encoding]) -> None:
    """Give tensors that share a range here, and not in the file, one of their own."""
    for graph in prepared_graphs(prepared):
        state, body = prepared_state(graph), graph.meta.get(BODY_KEY)
        of_graph = AlgorithmGraph(graph, Gathered())
        for shared in list(shared_ranges(of_graph)):
            scales: dict[Node, tuple[float, ...]] = {}
            for node in shared.units:
                name = node.name if body is None else f"{body}/{node.name}"
                if name in encodings:
                    scales[node] = encodings[name].scale
            widest = max(scales.values(), default=())
            own = {s: copy.deepcopy(shared.observer) for s in {*scales.values()} - {widest}}
            split_range(of_graph, shared, {n: own[s] for n, s in scales.items() if s in own})
        if of_graph.editor.finish():
            nodes = list(observers_of(graph))
            state.observer_infos |= infos_of_split(nodes, state.observer_infos, state.constants)


def _places(prepared: GraphModule) -> dict[str, list[_Place]]:
    """The observers of each observed tensor by its name, as the records name it."""
    found: dict[str, list[_Place]] = {}
    for graph in prepared_graphs(prepared):
        state = prepared_state(graph)
        own_observers(state)
        body = graph.meta.get(BODY_KEY)
        for source, observer, node in _observed(graph, state):
            value = node.meta.get("val")
            sizes = value.shape if isinstance(value, Tensor) else ()
            shape = tuple(s if isinstance(s, int) else None for s in sizes)
            name = source if body is None else f"{body}/{source}"
            found.setdefault(name, []).append(_Place(observer, shape))
    return found


def _observed(graph: GraphModule, state: PreparedState) -> Iterator[tuple[str, Any, Node]]:
    """(name, observer, a node of its shape) of each tensor with an observer, also held ones."""
    for node, observer in observers_of(graph):
        if node.meta.get(SPLIT_KEY, node.target) != node.target:
            continue  # the tensor for a concatenation: the range is that of the others there
        yield state.observer_infos[str(node.target)].source, observer, node
    names = {constant.node for constant in state.constants}
    nodes = {node.name: node for node in graph.graph.nodes if node.name in names}
    for constant in state.constants:
        yield constant.observer_info.source, constant.observer, nodes[constant.node]


def _take(
    fixed: dict[int, tuple[Encoding, ImportedQParams | None]],
    place: _Place,
    name: str,
    encoding: Encoding,
) -> None:
    """Note what becomes of one observer; None for one that keeps deriving its qparams."""
    key = id(place.observer)
    known = fixed.get(key)
    if known is None:
        is_derived = hasattr(place.observer, "obs_or_fqs")
        fixed[key] = encoding, None if is_derived else _imported_qparams(place, name, encoding)
        return
    other = known[0]
    if (other.scale, other.zero_point) != (encoding.scale, encoding.zero_point):
        raise ArtifactError(
            f'"{name}" and "{other.name}" share one scale here, but not in the file',
            fix="leave one of them out of the file",
        )


def _imported_qparams(place: _Place, name: str, encoding: Encoding) -> ImportedQParams:
    observer = place.observer
    if encoding.steps:
        raise ArtifactError(
            f'the qparams of "{name}" are of a tensor that an algorithm changed: '
            f"{'; '.join(encoding.steps)}",
            fix='export from a recipe that changes no tensor, "int8_minmax" for one',
        )
    if encoding.is_float:
        raise ArtifactError(
            f'"{name}" is float in the file, and quantized here',
            fix="leave it float: quantizer.set_node(name, None)",
        )
    qscheme = getattr(observer, "qscheme", None)
    if getattr(observer, "is_dynamic", False) or qscheme is None or observer.dtype not in _DTYPES:
        raise ArtifactError(
            f'"{name}" is quantized as {observer.dtype} by a {type(observer).__name__} here, which '
            "an encoding cannot say",
            fix="use a static scheme of integers for it, or leave it out of the file",
        )
    used = observer.quant_min, observer.quant_max
    bits = info(observer.dtype).bits if None in used else width_of(*used)
    if encoding.bits != bits:
        raise ArtifactError(
            f'"{name}" has {encoding.bits} bits in the file, and {bits} here',
            fix="prepare with a scheme of that width",
        )
    # A range of the same width may be stored in a wider dtype: count from its least integer.
    least = -(1 << (bits - 1)) if info(observer.dtype).signed else 0
    zero_point = [z + least for z in encoding.zero_point]
    if qscheme in SYMMETRIC and not encoding.is_symmetric:
        raise ArtifactError(
            f'"{name}" is affine in the file, and symmetric here',
            fix="prepare with an affine scheme, or leave it out of the file",
        )
    shape = _shape(place, name, encoding)
    return ImportedQParams(
        torch.tensor(encoding.scale, dtype=torch.float32).reshape(shape),
        torch.tensor(zero_point, dtype=torch.int32).reshape(shape),
        dtype=observer.dtype,
        qscheme=qscheme,
        quant_min=observer.quant_min,
        quant_max=observer.quant_max,
        ch_axis=int(getattr(observer, "ch_axis", None) or 0),
        group_size=getattr(observer, "group_size", None),
    )


def _shape(place: _Place, name: str, encoding: Encoding) -> tuple[int, ...]:
    """The shape of the qparams, checked against what is observed."""
    group_size = getattr(place.observer, "group_size", None)
    if encoding.group_size != group_size:
        raise ArtifactError(
            f'"{name}" has groups of {encoding.group_size} in the file, of {group_size} here',
            fix="prepare with a scheme of that group size",
        )
    expected: tuple[int | None, ...] = (1,)
    if group_size is not None:
        rows, columns = place.shape
        expected = (rows, None if columns is None else columns // group_size)
    elif place.observer.qscheme in PER_CHANNEL:
        expected = (place.shape[int(place.observer.ch_axis)],)
    counted = math.prod(size for size in expected if size is not None)
    if None in expected or counted != len(encoding.scale):
        raise ArtifactError(
            f'"{name}" has {len(encoding.scale)} scales in the file, and {counted} here',
            fix="prepare with a scheme of that granularity",
        )
    return tuple(size for size in expected if size is not None)


def _replace(prepared: GraphModule, made: Mapping[int, ImportedQParams]) -> None:
    """Put new observers in the place of old ones, also where others derive from them."""
    for graph in prepared_graphs(prepared):
        for node, observer in list(observers_of(graph)):
            if id(observer) in made:
                setattr(graph, str(node.target), made[id(observer)])
            elif hasattr(observer, "obs_or_fqs"):
                observer.obs_or_fqs = [made.get(id(o), o) for o in observer.obs_or_fqs]
        state = prepared_state(graph)
        state.constants = [
            replace(c, observer=made.get(id(c.observer), c.observer)) for c in state.constants
        ]
