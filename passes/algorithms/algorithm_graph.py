"""A graph as algorithms see and change it, with observers in it or before there are any."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2e_quant.core.formats.block_qparams import BlockQParams
from pt2e_quant.core.formats.blocks import spread
from pt2e_quant.core.qparams import QParams
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute, constant_of
from pt2e_quant.graph.op_table import OUT
from pt2e_quant.graph.ops import Family, argument, is_call
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.training.trained_qparams import qparams_of

__all__ = [
    "OUT",
    "STEPS_KEY",
    "AlgorithmGraph",
    "Constant",
    "Declined",
    "Gathered",
    "Grid",
    "has_integers",
    "is_quantized_output",
    "is_static_per_tensor",
    "unobserved",
]

STEPS_KEY = "pt2e_quant.steps"
"""The key of an observer node's `meta`: what algorithms did to the tensor, for its record."""

Gathered = dict[tuple[str, Node, str], Statistics]
"""Statistics by the name of the algorithm, the operator and the slot."""


class Declined(Exception):
    """Why an algorithm does nothing at a site."""


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
    """

    def __init__(self, gm: GraphModule, gathered: Gathered) -> None:
        self.gm = gm
        self.gathered = gathered
        self.editor = Editor(gm)
        self._readers: dict[int, int] | None = None

    def calls(self, family: Family) -> Iterator[Node]:
        """The calls of a family, in graph order."""
        return (node for node in self.gm.graph.nodes if is_call(node, family))

    def source(self, call: Node, name: str = "input") -> Node:
        """The tensor that an operand has, behind its observer if it has one."""
        operand = argument(call, name)
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
        """The same, None if the operator is called without this operand."""
        return None if argument(call, name) is None else self.constant(call, name)

    def _is_tied(self, value: Tensor) -> bool:
        """Whether another name reads the same storage."""
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
        made = MinMaxObserver(
            old.dtype, old.qscheme, quant_min=old.quant_min, quant_max=old.quant_max
        )
        self.gm.set_submodule(str(observed.target), made)
        for module in self.gm.modules():
            if isinstance(sources := getattr(module, "obs_or_fqs", None), list):
                sources[:] = [made if source is old else source for source in sources]
        return made

    def check_range(self, observed: Node) -> None:
        """Raise Declined unless the range of a tensor can be scaled, and was not before."""
        observer = self.observer(observed)
        if STEPS_KEY in observed.meta:
            raise Declined("it was scaled before")
        nodes = self.gm.graph.find_nodes(op="call_module")
        sharing = sum(self.observer(node) is observer for node in nodes)
        if sharing > 1:
            raise Declined(f"its range is shared by {sharing} tensors")

    def scale_statistics(self, readers: Sequence[Node], factors: Tensor) -> None:
        """Scale what was gathered at the input of operators whose input was multiplied."""
        made: dict[int, Statistics] = {}
        for key, statistics in list(self.gathered.items()):
            if key[1] in readers and key[2] != OUT:
                if id(statistics) not in made:
                    made[id(statistics)] = statistics.scaled(factors)
                self.gathered[key] = made[id(statistics)]


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
        """What it holds; not to be written into."""
        value = constant_of(self.graph.gm, self.node)
        assert value is not None  # AlgorithmGraph.constant has read it
        return value

    def set(self, value: Tensor, *, keeps_qparams: bool = False) -> None:
        """Give the operator another value, rounded to the dtype of this one.

        Args:
            value: of the same shape.
            keeps_qparams: its qparams stay; otherwise its observer starts again with the value.
        """
        value = value.to(self.value.dtype)
        new = self.graph.editor.rebind(self.node, value, reader=self.reader)
        self.reader.replace_input_with(self.node, new)
        self.node, observer = new, self.observer
        if observer is not None and not keeps_qparams and not _follows(observer):
            observer.reset_min_max_vals()
            observer(value)

    def note(self, step: str) -> None:
        """Add a line to the record of this tensor."""
        if self.observed is not None:
            self.observed.meta.setdefault(STEPS_KEY, []).append(step)

    def grid(self) -> "Grid":
        """What its values may be once they are quantized.

        Raises:
            Declined: they are not quantized to integers.
        """
        observer, value = self.observer, self.value
        if not has_integers(observer):
            raise Declined(f"the {self.node.target} has no integers")
        if not _seen(observer):
            observer = copy.deepcopy(observer)
            observer(value)
        if hasattr(observer, "block_qparams"):
            return _block_grid(observer.block_qparams(), value)
        return _grid(qparams_of(observer), value)


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that a tensor can have: (q - zero_point) * scale for integers q in a range.

    Args:
        scale: of the tensor's shape, as zero_point.
        zero_point: the integer that stands for 0.0.
        quant_min: least integer.
        quant_max: greatest integer.
    """

    scale: Tensor
    zero_point: Tensor
    quant_min: int
    quant_max: int

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest values, float32."""
        codes = (x / self.scale).round_().add_(self.zero_point)
        return codes.clamp_(self.quant_min, self.quant_max).sub_(self.zero_point).mul_(self.scale)

    def __getitem__(self, index: int) -> "Grid":
        """The grid of one index of the first axis."""
        return replace(self, scale=self.scale[index], zero_point=self.zero_point[index])

    def change(self, view: Callable[[Tensor], Tensor]) -> "Grid":
        """The grid of a tensor that a view is taken of."""
        return replace(self, scale=view(self.scale), zero_point=view(self.zero_point))


def _grid(qparams: QParams, value: Tensor) -> Grid:
    if qparams.zero_point.is_floating_point():
        raise Declined("its zero_points are no integers")

    def spread_out(given: Tensor) -> Tensor:
        if qparams.group_size is not None:
            return given.float().repeat_interleave(qparams.group_size, 1)
        shape = [1] * value.dim()
        if qparams.axis is not None:
            shape[qparams.axis] = -1
        return given.float().reshape(shape).expand_as(value)

    scale, zero_point = spread_out(qparams.scale), spread_out(qparams.zero_point)
    return Grid(scale, zero_point, qparams.quant_min, qparams.quant_max)


def _block_grid(qparams: BlockQParams, value: Tensor) -> Grid:
    assert qparams.scale is not None  # integers have scales
    scale, zero_point = qparams.scale.real(), qparams.zero_point
    if zero_point is None:
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
    scale, zero_point = (
        spread(given.float(), value.shape, qparams.block).expand_as(value)
        for given in (scale, zero_point)
    )
    return Grid(scale, zero_point, *qparams.scheme.range)


def _can_start_again(observer: Any) -> bool:
    if observer is None or _follows(observer):
        return True
    reset = getattr(type(observer), "reset_min_max_vals", None)
    return reset is not None and not reset.__qualname__.startswith("UniformQuantization")


def _follows(observer: Any) -> bool:
    """Whether an observer's qparams are not found from what it sees: derived ones, and floats."""
    return hasattr(observer, "derive_qparams_fn") or observer.dtype.is_floating_point


def _seen(observer: nn.Module) -> bool:
    low = getattr(observer, "min_val", None)
    seen = getattr(observer, "seen", None)
    if isinstance(seen, bool):
        return seen
    return isinstance(low, Tensor) and bool(low.numel()) and bool(low.isfinite().all())


def has_integers(observer: Any) -> bool:
    """Whether an observer finds static integer qparams of what it sees."""
    if observer is None or not hasattr(observer, "calculate_qparams"):
        return False
    if getattr(observer, "is_dynamic", False) or _follows(observer):
        return False
    scheme = getattr(observer, "scheme", None)
    return scheme is None or scheme.format is None


def is_static_per_tensor(observer: Any) -> bool:
    """Whether an observer finds integers of one scale in the range of calibration data."""
    qscheme = getattr(observer, "qscheme", None)
    is_per_tensor = qscheme in (torch.per_tensor_affine, torch.per_tensor_symmetric)
    if not is_per_tensor or getattr(observer, "is_dynamic", False):
        return False
    return not observer.dtype.is_floating_point and "min_val" in observer._buffers


def is_quantized_output(node: Node) -> bool:
    """Whether an operator's annotation asks for its output in integers."""
    annotation = node.meta.get(Q_ANNOTATION_KEY)
    return getattr(annotation, "output_qspec", None) is not None
