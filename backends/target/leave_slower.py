"""Find operators whose integer kernels measured much slower than float on a CPU like this."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.speed_classes import (
    IN_CACHE,
    LEAST_LEFT,
    ratio_here,
    shape_class,
)
from pt2e_quant.core.qdq import is_dequantize, is_quantize
from pt2e_quant.flow.report.report import FloatRegion
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.op_table import SLOWER, Preference
from pt2e_quant.graph.ops import CLAMP, HARDTANH, RELU, RELU6, is_call
from pt2e_quant.graph.pipeline import Note
from pt2e_quant.kernels.shape_classes import expected_sizes

_LARGE = 0.75
"""The share of the bound for results larger than the timed ones: floats then leave the cache."""
_KEY = "pt2e_quant_slower"
"""The key in `meta["custom"]` of the reason that a trial on this machine gave for a node."""
IN_FLOAT = "computes in float between its quantize and dequantize"
"""The report's text for an operator that integers would make slower."""
BYTES = (torch.uint8, torch.int8)
CLIPS = (*RELU, *RELU6, *HARDTANH, *CLAMP)

NOT_SLOWER = Preference(
    name=SLOWER, text="an integer kernel that measured not much slower than float here"
)
"""Such operators are quantized all the same: lowering computes them in float between q/dq."""


@dataclass(frozen=True, slots=True)
class Slower:
    """An operator that is to compute in float between its q/dq.

    Args:
        node: the operator.
        reads: the dq of computed values that it reads.
        note: why.
    """

    node: Node
    reads: list[Node]
    note: Note


def mark_slower(node: Node, text: str) -> None:
    """Mark an operator for `find_slower`, whatever the table says.

    Args:
        node: the operator.
        text: the measured reason.
    """
    node.meta["custom"] = {**node.meta.get("custom", {}), _KEY: text}


def is_marked_slower(node: Node) -> bool:
    """True for an operator that `mark_slower` marked."""
    return _KEY in node.meta.get("custom", {})


def find_slower(gm: GraphModule, backend: str, *, most: float) -> Iterator[Slower]:
    """The operators of a q/dq graph that are slower in integers by a trial or a backend's table.

    Dynamic sizes are judged as they are in the example inputs.

    Args:
        gm: the graph; it may be edited between two.
        backend: the name of the backend's folder.
        most: operators of a ratio below it are slower.
    """
    for node in list(gm.graph.nodes):
        reads = _computed(gm, node)
        text = node.meta.get("custom", {}).get(_KEY)
        if text is not None:
            yield Slower(node, reads, Note(node.name, text))
            continue
        ratio = ratio_here(node, backend) if reads and is_rounded(node) else None
        elements = elements_of(node)
        least = most if elements <= IN_CACHE else _LARGE * most
        if ratio is None or ratio >= least or elements < LEAST_LEFT:
            continue
        why = f"in integers it measured {ratio:.2f} times as fast ({shape_class(node)})"
        yield Slower(node, reads, Note(node.name, why))


def slower_regions(notes: Iterable[Note]) -> list[FloatRegion]:
    """Operators that integers would make slower, for the report."""
    return [
        FloatRegion(
            node=note.node,
            what=IN_FLOAT,
            reason=f'{note.text}; quantizer.allowing("slower") or lower(..., allow_slower=True) '
            "(--allow-slower) computes it in integers",
            cost="a dequantize and a copy of what it reads, a quantize of its result",
        )
        for note in notes
    ]


def _computed(gm: GraphModule, node: Node) -> list[Node]:
    """The dq from 8 bits of computed values that an operator reads; none if it reads floats too."""
    found = []
    for read in node.all_input_nodes if node.op == "call_function" else ():
        source = read.args[0] if is_dequantize(read) else read
        if not isinstance(source, Node) or constant_of(gm, source) is not None:
            continue
        if source is read or source.meta["val"].dtype not in BYTES:
            return []
        found.append(read)
    return found


def elements_of(node: Node) -> int:
    """The elements of a result, symbolic sizes as in the example inputs; 0 if one is not known."""
    held = node.meta.get("val")
    sizes = expected_sizes(held.shape) if isinstance(held, Tensor) else None
    return 0 if sizes is None else math.prod(sizes)


def is_rounded(node: Node) -> bool:
    """True if all that reads a result, behind clips, is a quantize."""
    return bool(node.users) and all(
        is_quantize(user) or (is_call(user, CLIPS) and is_rounded(user)) for user in node.users
    )
