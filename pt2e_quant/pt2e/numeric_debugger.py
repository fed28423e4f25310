"""torchao's names for comparing graphs node by node: loggers at the values that `compare` reads.

`pt2e_quant.compare` gives more figures, needs no logger, and keeps no outputs.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.nn import functional
from torch.utils import _pytree as pytree

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.analysis.graph_side import GraphSide
from pt2e_quant.analysis.measure import Noise
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.flow.node_outputs import NodeSourceDebugInfo
from pt2e_quant.graph.meta import origin_source
from pt2e_quant.graph.subgraphs import bfs_trace_with_node_process

NUMERIC_DEBUG_HANDLE_KEY = "numeric_debug_handle"
CUSTOM_KEY = "custom"
FROM_NODE_KEY = "from_node"


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
        self.stats.append(pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), x))
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

        def of_pair(x: Any, y: Any) -> Tensor | None:
            return loss_function(x.float(), y.float()) if isinstance(x, Tensor) else None

        return pytree.tree_map(of_pair, self.actual, self.ref)

    def __repr__(self) -> str:
        return f"QuantizationComparisonResult(mse_loss={self.mse_loss}, sqnr={self.sqnr})"


@dataclass(frozen=True)
class NodeAccuracySummary:
    """The results of one node in the float and the quantized graph.

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
    """A copy of a graph that keeps the value of each node, of a quantized one as readers see it."""
    model = copy.deepcopy(model)
    sites = [site for site in GraphSide(model, "", every=True).sites.values()]
    for count, site in enumerate(sites):
        node = site.node
        if node.op == "placeholder":
            continue
        source = origin_source(node)
        info = NodeSourceDebugInfo(site.name, 0 if source is None else source.graph_id)
        name = f"{node.name}_logger_{count}"
        model.add_submodule(name, OutputLogger(info, node.name, node.meta.get("nn_module_stack")))
        readers = list(site.value.users)
        with model.graph.inserting_after(site.value):
            logged = model.graph.call_module(name, (site.value,))
        for reader in readers:
            reader.replace_input_with(site.value, logged)
    recompile(model)
    return model


def extract_results_from_loggers(model: GraphModule) -> Results:
    """The outputs that a graph of `prepare_for_propagation_comparison` has kept, by origin."""
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


def _is_alike(x: Any, y: Any) -> bool:
    """True if two outputs have one structure, tensors of one shape, and all else alike."""
    (ours, spec), (theirs, other) = pytree.tree_flatten(x), pytree.tree_flatten(y)
    return spec == other and all(map(_is_alike_leaf, ours, theirs))


def _is_alike_leaf(x: Any, y: Any) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape
    return type(x) is type(y) and bool(x == y)


def _sqnr(x: Tensor, y: Tensor) -> Tensor:
    noise = Noise()
    noise.add(x, y)
    return torch.tensor(noise.sqnr_db)
