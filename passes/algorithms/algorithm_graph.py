"""A graph as algorithms see and change it, with observers in it or before there are any."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2e_quant.core.formats.block_qparams import BlockQParams, keep_scale
from pt2e_quant.core.qparams import QParams
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute, constant_of
from pt2e_quant.graph.op_table import OUT
from pt2e_quant.graph.ops import Overloads, argument, is_call, layer_operands
from pt2e_quant.observers.static.fixed import ImportedQParams
from pt2e_quant.observers.static.minmax import MinMaxObserver, min_max_like
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.training.trained_qparams import qparams_of
from pt2e_quant.passes.algorithms.gathered import Gathered
from pt2e_quant.passes.algorithms.grid import Declined, Grid, grid_of, scale_of
from pt2e_quant.passes.algorithms.paired_run import PairedRun

__all__ = [
    "OUT",
    "STEPS_KEY",
    "AlgorithmGraph",
    "Constant",
    "has_integers",
    "is_quantized_output",
    "is_static_per_tensor",
    "unobserved",
]

STEPS_KEY = "pt2e_quant.steps"
"""The key of an observer node's `meta`: what algorithms did to the tensor, for its record."""


def unobserved(node: Node) -> Node:
    """The tensor that an observer node hands on; any other node itself."""
    while node.op == "call_module":
        node = node.all_input_nodes[0]
    return node


class AlgorithmGraph:
    """The operators of a graph, their inputs behind observers, and their constants.

    Args:
        gm: edited in place through `editor`.
        gathered: the statistics of all sites; scaling a tensor scales them.
        keeps_function: what is done to it leaves what the float model computes as it is.
    """

    def __init__(self, gm: GraphModule, gathered: Gathered, *, keeps_function: bool = True) -> None:
        self.gm = gm
        self.gathered = gathered
        self.keeps_function = keeps_function
        self.editor = Editor(gm)
        self._readers: dict[int, int] | None = None

    def calls(self, overloads: Overloads) -> Iterator[Node]:
        """The calls of an operator, in graph order."""
        return (node for node in self.gm.graph.nodes if is_call(node, overloads))

    def quantized(self, overloads: Overloads) -> list[Node]:
        """The calls of an operator whose weights get static integers, in graph order."""
        return [
            n for n in self.calls(overloads) if has_integers(self.observer(layer_operands(n)[1]))
        ]

    def source(self, call: Node) -> Node:
        """The tensor that a layer multiplies with its weight, behind its observer if it has one."""
        operand, _ = layer_operands(call)
        return unobserved(operand)

    def observer(self, node: object) -> Any:
        """The observer that a node is, None if it is no observer node."""
        if not isinstance(node, Node) or node.op != "call_module":
            return None
        return attribute(self.gm, str(node.target))

    def constant(self, call: Node, name: str, *, keeps_qparams: bool = False) -> "Constant":
        """A constant operand that this call alone reads, to be changed.

        Args:
            call: the operator.
            name: of its operand.
            keeps_qparams: it will be changed by `set(…, keeps_qparams=True)` only.

        Raises:
            Declined: it is no constant, others read it, or its observer cannot start again.
        """
        operand, text = argument(call, name), f"the {name} of {call.name}"
        is_observed = isinstance(operand, Node) and operand.op == "call_module"
        node = operand.all_input_nodes[0] if is_observed else operand
        value = constant_of(self.gm, node) if isinstance(node, Node) else None
        if value is None or node.op != "get_attr":
            raise Declined(f"{text} is no constant")
        found = Constant(self, call, node, operand if is_observed else None)
        if (
            set(node.users) != {found.reader}
            or set(operand.users) != {call}
            or self._is_tied(value)
        ):
            raise Declined(f"{text} has other readers")
        if not keeps_qparams and not _can_start_again(found.observer):
            raise Declined(f"{type(found.observer).__name__} of {text} cannot start again")
        return found

    def optional_constant(self, call: Node, name: str) -> "Constant | None":
        """As `constant`; None if the operator is called without this operand."""
        return None if argument(call, name) is None else self.constant(call, name)

    def _is_tied(self, value: Tensor) -> bool:
        """True if another name reads the same storage."""
        if self._readers is None:
            self._readers = {}
            for node in self.gm.graph.find_nodes(op="get_attr"):
                if (held := constant_of(self.gm, node)) is not None:
                    address = held.untyped_storage().data_ptr()
                    self._readers[address] = self._readers.get(address, 0) + len(node.users)
        return self._readers.get(value.untyped_storage().data_ptr(), 1) > 1

    def scale_range(
        self, observed: Node, statistics: Statistics, factors: Tensor, step: str
    ) -> None:
        """Tell the observer of a tensor that its channels were multiplied by positive factors.

        One that keeps more than a range (a histogram) is replaced by one of minimum and maximum.

        Args:
            observed: the observer node; `check_range` has passed.
            statistics: of the tensor as it was, with `low` and `high` by block and channel.
            factors: [C].
            step: what was done, for the record of the tensor.
        """
        scaled: Any = statistics.scaled(factors)
        observer = self.observer(observed)
        if not hasattr(observer, "set_extremes"):
            observer = self._as_min_max(observed, observer)
        observer.set_extremes(scaled.low.amin(1), scaled.high.amax(1))
        observed.meta.setdefault(STEPS_KEY, []).append(step)

    def _as_min_max(self, observed: Node, old: Any) -> MinMaxObserver:
        """Put an observer of minimum and maximum in the place of another of the same integers."""
        made = min_max_like(old)
        self.put_observer(observed, made)
        return made

    def put_observer(self, observed: Node, made: nn.Module) -> None:
        """Put another observer in the place of one, also where others derive from it."""
        old = self.observer(observed)
        self.gm.set_submodule(str(observed.target), made)
        for module in self.gm.modules():
            if isinstance(sources := getattr(module, "obs_or_fqs", None), list):
                sources[:] = [made if source is old else source for source in sources]

    def check_range(self, observed: Node) -> None:
        """Raise Declined unless the range of a tensor can be scaled, and was not before."""
        if STEPS_KEY in observed.meta:
            raise Declined("it was scaled before")
        if (sharing := self.sharing(observed)) > 1:
            raise Declined(f"its range is shared by {sharing} tensors")

    def sharing(self, observed: Node) -> int:
        """Return the number of observer nodes that share this one's observer."""
        observer, nodes = self.observer(observed), self.gm.graph.find_nodes(op="call_module")
        return sum(self.observer(node) is observer for node in nodes)

    def scale_statistics(self, readers: Sequence[Node], factors: Tensor) -> None:
        """Scale what was gathered at the input of operators whose input was multiplied."""
        made: dict[int, Statistics] = {}
        for key, statistics in list(self.gathered.statistics.items()):
            if key[1] in readers and key[2] != OUT:
                if id(statistics) not in made:
                    made[id(statistics)] = statistics.scaled(factors)
                self.gathered.statistics[key] = made[id(statistics)]

    @cached_property
    def run(self) -> "PairedRun":
        """The kept calls of calibration, run through the graph in float and quantized.

        Raises:
            Declined: no call came.
        """
        calls = self.gathered.calls
        if not calls or not all(calls.values()):
            raise Declined("no calibration data reached it")
        return PairedRun(self.gm, calls, self.gathered.floats)


@dataclass(slots=True)
class Constant:
    """A constant operand of one call.

    Args:
        graph: what it is in.
        call: the operator.
        node: the `get_attr` node.
        observed: its observer node; None where convert observes it, or before there are any.
    """

    graph: AlgorithmGraph
    call: Node
    node: Node
    observed: Node | None

    @property
    def reader(self) -> Node:
        """The node that reads it: its observer's, else the operator."""
        return self.observed or self.call

    @property
    def observer(self) -> Any:
        """Its observer, None if there is no observer node."""
        return self.graph.observer(self.observed)

    @property
    def value(self) -> Tensor:
        """The float value; not to be written into."""
        value = constant_of(self.graph.gm, self.node)
        assert value is not None  # AlgorithmGraph.constant has read it
        return value

    def set(self, value: Tensor, *, keeps_qparams: bool = False) -> None:
        """Give the operator another value, rounded to the dtype of this one.

        Args:
            value: of the same shape.
            keeps_qparams: its qparams stay; otherwise its observer starts again with the value.
        """
        value, before, gathered = value.to(self.value.dtype), self.value, self.graph.gathered
        was_float = gathered.floats.pop(self.node, before)
        new = self.graph.editor.rebind(self.node, value, reader=self.reader)
        self.reader.replace_input_with(self.node, new)
        self.node, observer = new, self.observer
        if not self.graph.keeps_function and gathered.calls:
            gathered.floats[new] = was_float
        if observer is not None and not keeps_qparams and not _follows(observer):
            observer.reset_min_max_vals()
            observer(value)

    def note(self, step: str) -> None:
        """Add a line to the record of this tensor."""
        if self.observed is not None:
            self.observed.meta.setdefault(STEPS_KEY, []).append(step)

    def grid(self, of: Tensor | None = None) -> Grid:
        """The values that its elements can have once they are quantized.

        Args:
            of: as `qparams` has it.

        Raises:
            Declined: they are not quantized to integers.
        """
        return grid_of(self.qparams(of), self.value if of is None else of)

    def qparams(self, of: Tensor | None = None) -> QParams | BlockQParams:
        """The qparams that its observer chooses.

        Args:
            of: another value, of as many dimensions, whose qparams are wanted instead.

        Raises:
            Declined: it is not quantized to integers.
        """
        observer = self.observer
        if not has_integers(observer):
            raise Declined(f"the {self.node.target} has no integers")
        if of is not None and not _can_start_again(observer):
            raise Declined(f"{type(observer).__name__} of {self.node.target} cannot start again")
        if of is not None or not has_value(observer):
            observer = copy.deepcopy(observer)
            if of is not None:
                observer.reset_min_max_vals()
            observer(self.value if of is None else of)
        found: BlockQParams
        if hasattr(observer, "block_qparams"):
            found = observer.block_qparams()
            return found
        return qparams_of(observer)

    def limit_scale(self, least: Tensor) -> Tensor:
        """Give its integers scales not below these, and let no algorithm shrink or take them back.

        Args:
            least: float32, of the shape of those in `qparams()`.

        Returns:
            What the scales were multiplied by, likewise.

        Raises:
            Declined: as `set_scale`.
        """
        scale, gathered = scale_of(self.qparams()), self.graph.gathered
        assert self.observed is not None  # `qparams` has found an observer
        gathered.least_scales[self.observed] = least
        if bool((least > scale).any()):
            self.set_scale(scale)
            gathered.observers.pop(self.observed)
        return torch.maximum(scale, least) / scale

    def least_factors(self) -> Tensor:
        """What its scales may be multiplied by at least, of their shape, at most 1."""
        scale = scale_of(self.qparams())
        least = self.graph.gathered.least_scales.get(self.observed)  # type: ignore[arg-type]
        return torch.zeros_like(scale) if least is None else (least / scale).clamp(max=1.0)

    def set_scale(self, scale: Tensor, zero_point: Tensor | None = None) -> None:
        """Fix the scales of its integers.

        Args:
            scale: float32, of the shape of those in `qparams()`, positive; those below the limits
                are raised to them.
            zero_point: of plain integers, int32 and shaped likewise; None for those it has.

        Raises:
            Declined: they cannot be fixed, as other tensors share its observer.
        """
        found, observed, graph = self.qparams(), self.observed, self.graph
        assert observed is not None  # `qparams` has found an observer
        if graph.sharing(observed) > 1:
            raise Declined(f"the scales of the {self.node.target} are shared")
        least = graph.gathered.least_scales.get(observed)
        if least is not None:
            scale = torch.maximum(scale, least)
        if isinstance(found, BlockQParams):
            fixed = copy.deepcopy(self.observer)
            if not has_value(fixed):
                fixed(self.value)
            fixed.found = replace(found, scale=keep_scale(scale, found.scheme.scales))
        else:
            fixed = ImportedQParams(
                scale,
                found.zero_point if zero_point is None else zero_point,
                dtype=found.dtype,
                qscheme=self.observer.qscheme,
                quant_min=found.quant_min,
                quant_max=found.quant_max,
                ch_axis=found.axis or 0,
                group_size=found.group_size,
            )
        graph.gathered.observers.setdefault(observed, self.observer)
        graph.put_observer(observed, fixed)


def _can_start_again(observer: Any) -> bool:
    if observer is None or _follows(observer):
        return True
    reset = getattr(type(observer), "reset_min_max_vals", None)
    return reset is not None and not reset.__qualname__.startswith("UniformQuantization")


def _follows(observer: Any) -> bool:
    """True if an observer's qparams are not found from what it sees: derived ones, and floats."""
    return hasattr(observer, "derive_qparams_fn") or observer.dtype.is_floating_point


def has_value(observer: nn.Module) -> bool:
    """True if an observer of a constant has been shown it."""
    low = getattr(observer, "min_val", None)
    seen = getattr(observer, "seen", None)
    if isinstance(seen, bool):
        return seen
    return isinstance(low, Tensor) and bool(low.numel()) and bool(low.isfinite().all())


def has_integers(observer: Any) -> bool:
    """True if an observer finds static integer qparams of what it sees."""
    if observer is None or not hasattr(observer, "calculate_qparams"):
        return False
    if getattr(observer, "is_dynamic", False) or _follows(observer):
        return False
    scheme = getattr(observer, "scheme", None)
    return scheme is None or scheme.format is None


def is_static_per_tensor(observer: Any) -> bool:
    """True if an observer finds integers of one scale in the range of calibration data."""
    qscheme = getattr(observer, "qscheme", None)
    is_per_tensor = qscheme in (torch.per_tensor_affine, torch.per_tensor_symmetric)
    if not is_per_tensor or getattr(observer, "is_dynamic", False):
        return False
    return not observer.dtype.is_floating_point and "min_val" in observer._buffers


def is_quantized_output(node: Node) -> bool:
    """True if an operator's annotation asks for its output in integers."""
    annotation = node.meta.get(Q_ANNOTATION_KEY)
    return getattr(annotation, "output_qspec", None) is not None
