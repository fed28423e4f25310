"""What each node of two graphs of one model computes, side by side.

Every node knows the node of the exported program that it comes from (`from_node` metadata), in the
float graph as in one prepared or converted from it: outputs are matched by that.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.nn import functional

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.graph.subgraphs import bfs_trace_with_node_process

NUMERIC_DEBUG_HANDLE_KEY = "numeric_debug_handle"
CUSTOM_KEY = "custom"
FROM_NODE_KEY = "from_node"

_UNLIFT = "ExportedProgram.module().unlift()"


@dataclass(frozen=True)
class NodeSourceDebugInfo:
    """A node of the exported program.

    Args:
        name: its name.
        graph_id: the id of its graph.
    """

    name: str
    graph_id: int


Results = dict[NodeSourceDebugInfo, tuple[str | None, object, list[Any]]]
"""By origin: name of the node, its module stack, and its output in each run."""


class OutputLogger(nn.Module):
    """Keeps what passes through it.

    Args:
        debug_info: where the observed node comes from.
        node_name: the node's name.
        nn_module_stack: the node's module stack.
    """

    # torch.fx keeps calls of such modules, though nothing may read their results.
    _is_impure = True

    def __init__(
        self,
        debug_info: NodeSourceDebugInfo,
        node_name: str | None = None,
        nn_module_stack: object | None = None,
    ) -> None:
        super().__init__()
        self.debug_info = debug_info
        self.node_name = node_name
        self.nn_module_stack = nn_module_stack
        self.stats: list[object] = []

    def forward(self, x: object) -> object:
        """Keep x; returns it."""
        self.stats.append(_map_tensors(lambda t: t.detach().clone(), x))
        return x


@dataclass(frozen=True)
class QuantizationComparisonResult:
    """The outputs of one node in one run of each graph.

    Args:
        actual: of the quantized graph.
        ref: of the float graph.

    Raises:
        ConfigError: they differ in structure or shape.
    """

    actual: Any
    ref: Any

    def __post_init__(self) -> None:
        if not _is_alike(self.actual, self.ref):
            raise ConfigError(f"outputs differ in shape: {self.actual} and {self.ref}")

    @property
    def mse_loss(self) -> object:
        """The mean squared error."""
        return self.loss(functional.mse_loss)

    @property
    def sqnr(self) -> object:
        """Signal to quantization noise in decibels, actual as the signal, as upstream has it."""
        return self.loss(_sqnr)

    def loss(self, loss_function: Callable[[Tensor, Tensor], Tensor]) -> object:
        """A loss of each pair of tensors, in the structure of the outputs."""
        return _loss(loss_function, self.actual, self.ref)

    def __repr__(self) -> str:
        return f"QuantizationComparisonResult(mse_loss={self.mse_loss}, sqnr={self.sqnr})"


@dataclass(frozen=True)
class NodeAccuracySummary:
    """How one node fares in the quantized graph.

    Args:
        debug_info: where the node comes from.
        actual_node_name: its name in the quantized graph.
        actual_module_stack: its module there.
        ref_node_name: its name in the float graph.
        ref_module_stack: its module there.
        results: one for each run.
    """

    debug_info: NodeSourceDebugInfo
    actual_node_name: str
    actual_module_stack: str
    ref_node_name: str
    ref_module_stack: str
    results: Sequence[QuantizationComparisonResult]


def generate_numeric_debug_handle(ep: ExportedProgram) -> None:
    """Number the nodes of an exported program, in place; numbers that are there stay.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(ep, ExportedProgram):
        raise ConfigError(f"an ExportedProgram is needed, found {type(ep).__name__}")
    taken = [0]

    def note(node: Node) -> None:
        taken.append(_handle(node))

    bfs_trace_with_node_process(ep, note)
    following = iter(range(max(taken) + 1, max(taken) + 1 + len(taken)))

    def number(node: Node) -> None:
        custom = node.meta.setdefault(CUSTOM_KEY, {})
        if NUMERIC_DEBUG_HANDLE_KEY not in custom:
            custom[NUMERIC_DEBUG_HANDLE_KEY] = next(following)

    bfs_trace_with_node_process(ep, number)


def _handle(node: Node) -> int:
    return int(node.meta.get(CUSTOM_KEY, {}).get(NUMERIC_DEBUG_HANDLE_KEY, 0))


def prepare_for_propagation_comparison(model: GraphModule) -> GraphModule:
    """A copy of a graph that keeps the output of each node that comes from the exported program."""
    model = copy.deepcopy(model)
    for count, (node, info) in enumerate(list(_origins(model))):
        name = f"{node.name}_logger_{count}"
        logger = OutputLogger(info, node.name, node.meta.get("nn_module_stack"))
        model.add_submodule(name, logger)
        readers = list(node.users)
        with model.graph.inserting_after(node):
            logged = model.graph.call_module(name, (node,))
        for reader in readers:
            reader.replace_input_with(node, logged)
    recompile(model)
    return model


def _origins(model: GraphModule) -> Iterator[tuple[Node, NodeSourceDebugInfo]]:
    for node in model.graph.nodes:
        sources = node.meta.get(FROM_NODE_KEY)
        if node.op in ("placeholder", "output") or not sources:
            continue
        source = sources[-1]
        if source.pass_name == _UNLIFT:
            continue
        while source.from_node:
            source = source.from_node[-1]
        yield node, NodeSourceDebugInfo(name=source.name, graph_id=source.graph_id)


def extract_results_from_loggers(model: GraphModule) -> Results:
    """What a graph of `prepare_for_propagation_comparison` has kept, by origin."""
    loggers = [m for m in model.children() if isinstance(m, OutputLogger) and m.stats]
    return {m.debug_info: (m.node_name, m.nn_module_stack, m.stats) for m in loggers}


def compare_results(
    ref_results: Results, actual_results: Results
) -> dict[NodeSourceDebugInfo, NodeAccuracySummary]:
    """Pair the outputs of nodes that both graphs have.

    Raises:
        ConfigError: outputs of one node differ in shape; the node is named.
    """
    found = {}
    for info, (ref_name, ref_stack, ref_stats) in ref_results.items():
        if info not in actual_results:
            continue
        name, stack, stats = actual_results[info]
        try:
            results = [
                QuantizationComparisonResult(actual=actual, ref=ref)
                for actual, ref in zip(stats, ref_stats, strict=False)
            ]
        except ConfigError as error:
            raise ConfigError(f'"{ref_name}" and "{name}": {error.what}') from error
        found[info] = NodeAccuracySummary(
            debug_info=info,
            actual_node_name=name or "",
            actual_module_stack=_module_of(stack),
            ref_node_name=ref_name or "",
            ref_module_stack=_module_of(ref_stack),
            results=results,
        )
    return found


def _module_of(stack: object) -> str:
    if not isinstance(stack, dict) or not stack:
        return str(stack)
    return str(list(stack.values())[-1][0])


def _map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_map_tensors(function, item) for item in value])
    if isinstance(value, dict):
        return {key: _map_tensors(function, item) for key, item in value.items()}
    return value


def _is_alike(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return len(x) == len(y) and all(map(_is_alike, x, y))
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(_is_alike(x[key], y[key]) for key in x)
    return type(x) is type(y) and bool(x == y)


def _loss(function: Callable[[Tensor, Tensor], Tensor], x: Any, y: Any) -> object:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return function(x.to(torch.float32), y.to(torch.float32))
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return type(x)([_loss(function, a, b) for a, b in zip(x, y, strict=True)])
    if isinstance(x, dict) and isinstance(y, dict):
        return {key: _loss(function, x[key], y[key]) for key in x}
    return None


def _sqnr(x: Tensor, y: Tensor) -> Tensor:
    return 20 * torch.log10(torch.norm(x) / torch.norm(x - y))
