"""The time of each operator of an ONNX Runtime session, by the nodes of the canonical graph."""

import json
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
from torch.fx import Node

from pt2e_quant.backends.onnx.runtime import (
    Operator,
    OperatorKind,
    SessionCall,
    open_session,
    read_operators,
)
from pt2e_quant.backends.profile import NodeTime, Profile, WorkKind
from pt2e_quant.core.errors import module_path
from pt2e_quant.kernels.cost import Cost

_ROUNDS = 7
_SUFFIX = "_kernel_time"
_MOVES = frozenset(
    (
        *("Cast", "Concat", "Expand", "Flatten", "Gather", "Identity", "Pad", "ReorderInput"),
        *("ReorderOutput", "Reshape", "Slice", "Split", "Squeeze", "Tile", "Transpose"),
        "Unsqueeze",
    )
)
"""Operators that compute nothing; "Cast" changes the type alone."""

_KINDS = {
    OperatorKind.INTEGER: WorkKind.INTEGER,
    OperatorKind.FLOAT: WorkKind.FLOAT,
    OperatorKind.CONVERT: WorkKind.CONVERT,
    OperatorKind.INDEX: WorkKind.MOVE,
}
_ROWS = re.compile(r"_rows_[a-z_]+$")
"""The names of what `choose_rows` makes for `multiply_rows`: each row's scale and zero_point."""

_ADDED = re.compile(r"(_token_\d+|/duplicated.*|_nchwc|_quant|_fused)$")
"""Suffixes that ONNX Runtime adds to the names of nodes that it makes from others."""


@dataclass(slots=True)
class _Event:
    """One operator of the session: its type, the bytes that it reads and writes, its times."""

    op_type: str
    size: int
    times: list[float] = field(default_factory=list)


def profile_session(
    model: bytes, given: Sequence[Any], *, threads: int, known: Iterable[Node]
) -> Profile:
    """Time each operator of a call, as the median of some rounds.

    Args:
        model: the file's bytes.
        given: what the model takes, in the order of its inputs.
        threads: of the session, 0 leaves the choice to ONNX Runtime.
        known: the nodes of the canonical graph; operators get the names that they have there.
    """
    with tempfile.TemporaryDirectory(prefix="pt2e_quant_") as folder:
        path = Path(folder) / "optimized.onnx"
        session = open_session(
            model, threads=threads, optimized_path=path, profile_prefix=Path(folder) / "times"
        )
        call = SessionCall(session)
        call.run(given)  # prepares memory; its events are left out
        calls = []
        for _ in range(_ROUNDS):
            begin = time.perf_counter()
            call.run(given)
            calls.append(1e6 * (time.perf_counter() - begin))
        events = _read_events(Path(session.end_profiling()))
        operators = read_operators(onnx.load(str(path), load_external_data=False).graph)
    return Profile(
        tuple(_joined(events, operators, {node.name: node for node in known})),
        runtime="ONNX Runtime",
        call_us=statistics.median(calls),
    )


def _read_events(path: Path) -> dict[str, _Event]:
    """The operators by their names, in order of call, without the first call's times."""
    found: dict[str, _Event] = {}
    for row in json.loads(path.read_text()):
        name = row["name"]
        if row.get("cat") != "Node" or not name.endswith(_SUFFIX):
            continue
        facts = row["args"]
        names = ("activation_size", "parameter_size", "output_size")
        size = sum(int(facts.get(key, 0)) for key in names)
        event = found.setdefault(name.removesuffix(_SUFFIX), _Event(facts["op_name"], size))
        event.times.append(float(row["dur"]))
    for event in found.values():
        event.times = event.times[len(event.times) // (_ROUNDS + 1) :]
    return found


def _joined(
    events: dict[str, _Event], operators: Sequence[Operator], known: dict[str, Node]
) -> Iterable[NodeTime]:
    """Each event with the node of the canonical graph that it comes from."""
    by_name = {operator.name: operator for operator in operators if operator.name}
    unnamed: dict[str, list[Operator]] = defaultdict(list)
    for operator in operators:
        if not operator.name:
            unnamed[operator.op_type].append(operator)
    met: Counter[str] = Counter()
    for name, event in events.items():
        found = by_name.get(name)
        if found is None and met[event.op_type] < len(unnamed[event.op_type]):
            found = unnamed[event.op_type][met[event.op_type]]
            met[event.op_type] += 1
        node = _node_of([name, found.output if found else ""], known)
        yield NodeTime(
            node=node.name if node is not None else _plain(name),
            module=module_path(node) if node is not None else "",
            kernel=event.op_type,
            is_fused=False,
            kind=WorkKind.CONVERT if _ROWS.search(name) else _kind(event.op_type, found),
            cost=Cost(bytes=event.size, operations=0),
            time_us=statistics.median(event.times),
        )


def _kind(op_type: str, operator: Operator | None) -> WorkKind:
    if op_type in _MOVES:
        return WorkKind.MOVE
    return _KINDS[operator.kind] if operator is not None else WorkKind.FLOAT


def _node_of(names: Iterable[str], known: dict[str, Node]) -> Node | None:
    """The node that one of some names of an operator stands for: "linear" of "linear_scaled"."""
    for name in map(_plain, names):
        stem = name
        while stem:
            if stem in known and not name[len(stem) :].lstrip("_")[:1].isdigit():
                return known[stem]
            stem = stem.rpartition("_")[0]
    return None


def _plain(name: str) -> str:
    """A name without what the exporter and ONNX Runtime add to that of the graph.

    >>> _plain("node_conv2d_1_token_4")
    'conv2d_1'
    """
    while found := _ADDED.search(name):
        name = name[: found.start()]
    return name.removeprefix("fused ").removeprefix("node_")
