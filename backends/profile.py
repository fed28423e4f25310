"""What a lowered module does in a call: node by node, on the clock and in torch's profiler."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from pt2e_quant.backends.fuse_kernels import KERNEL_KEY
from pt2e_quant.core.errors import module_path
from pt2e_quant.graph.op_table import operator_name
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.profiler_range import label_of

_ROUNDS = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTime:
    """One operator of a call.

    Args:
        node: its name in the graph.
        module: the path of the module that it came from.
        kernel: the fused operator, or the name of the float one.
        is_fused: whether a kernel of the registry put it there.
        cost: bytes and operations; operations are 0 for what only moves data, and for float
            operators, which nothing here counts.
        time_us: the median over the rounds.
    """

    node: str
    module: str
    kernel: str
    is_fused: bool
    cost: Cost
    time_us: float


@dataclass(frozen=True, slots=True)
class Profile:
    """All operators of a call, in order; prints as a table."""

    nodes: tuple[NodeTime, ...]

    @property
    def time_us(self) -> float:
        """Of all operators together, without Python between them."""
        return sum(node.time_us for node in self.nodes)

    def share(self, node: NodeTime) -> float:
        """A node's part of the whole, from 0 to 1."""
        return node.time_us / self.time_us if self.time_us else 0.0

    def __str__(self) -> str:
        table = Table("node", "module", "kernel", title=f"{self.time_us:,.0f} us in operators")
        for heading in ("bytes", "operations", "us", "share"):
            table.add_column(heading, justify="right")
        for node in sorted(self.nodes, key=lambda n: -n.time_us):
            figures = f"{node.cost.bytes:,}", f"{node.cost.operations:,}", f"{node.time_us:.1f}"
            table.add_row(
                node.node, node.module, node.kernel, *figures, f"{100 * self.share(node):.1f} %"
            )
        console = Console(width=130, no_color=True)
        with console.capture() as captured:
            console.print(table)
        return captured.get()


class Profiled(Interpreter):
    """Runs a lowered module with every fused operator in a range of torch's profiler.

    The range is named `pt2e_quant::<op> <module path> <node> <layout>`.
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.ranges = {node: _range_name(node) for node in module.graph.nodes if _kernel(node)}

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        name = self.ranges.get(n)
        if name is None:
            return super().run_node(n)
        with torch.profiler.record_function(name):
            return super().run_node(n)


def _kernel(node: Node) -> Kernel | None:
    found: Kernel | None = node.meta.get(KERNEL_KEY)
    return found


def _range_name(node: Node) -> str:
    kernel = _kernel(node)
    assert kernel is not None
    value = node.meta["val"]
    layout = "channels_last" if value.dim() == 4 else "contiguous"
    where = label_of(node)
    return f"pt2e_quant::{kernel.op} {where} {layout}"


class _Timed(Interpreter):
    """Keeps each call's time, and the bytes that went in and out."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.times: dict[Node, list[float]] = {}
        self.moved: dict[Node, int] = {}
        self.waits = any(t.is_cuda for t in (*module.parameters(), *module.buffers()))

    def _now(self) -> float:
        """Seconds, after all that was launched has run."""
        if self.waits:
            torch.cuda.synchronize()
        return time.perf_counter()

    def run_node(self, n: Node) -> Any:
        """Run one node on the clock."""
        if n.op != "call_function":
            return super().run_node(n)
        begin = self._now()
        result = super().run_node(n)
        self.times.setdefault(n, []).append(1e6 * (self._now() - begin))
        values = [*(self.env[source] for source in n.all_input_nodes if source in self.env), result]
        self.moved[n] = sum(_bytes(value) for value in values)
        return result


def _bytes(value: Any) -> int:
    # Opaque packed weights tell no element count of theirs; their shape is the plain weight's.
    return moved_bytes(value) if isinstance(value, Tensor) else 0


def profile(module: GraphModule, arguments: Sequence[Any]) -> Profile:
    """Time each operator of a module's call, as the median of some rounds.

    On a GPU each launch is waited for: short kernels look as long as their launch.

    Args:
        module: a lowered one.
        arguments: of its forward.
    """
    timed = _Timed(module)
    timed.garbage_collect_values = False
    with torch.no_grad():
        for _ in range(_ROUNDS):
            timed.run(*arguments)
    return Profile(
        tuple(
            NodeTime(
                node=node.name,
                module=module_path(node),
                kernel=kernel.op if (kernel := _kernel(node)) else operator_name(node),
                is_fused=kernel is not None,
                cost=Cost(bytes=timed.moved[node], operations=_operations(node)),
                time_us=statistics.median(times),
            )
            for node, times in timed.times.items()
        )
    )


def _operations(node: Node) -> int:
    kernel = _kernel(node)
    found = kernel.cost(node).operations if kernel else 0
    return found if type(found) is int else 0  # symbolic: the sizes of the sample are not known
