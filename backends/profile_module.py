"""Profile a call of a lowered module node by node, by the clock or in torch's profiler."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from pt2e_quant.backends.fuse_kernels import ANCHOR_KEY, KERNEL_KEY
from pt2e_quant.backends.profile import NodeTime, Profile, WorkKind
from pt2e_quant.core.errors import module_path
from pt2e_quant.core.qdq import CHOOSE_QPARAMS_OPS, is_qdq
from pt2e_quant.graph.alias import aliased_argument
from pt2e_quant.graph.op_table import operator_name
from pt2e_quant.graph.ops import CASTS, CAT, PAD, SPLIT, STACK, VIEWS, is_call, is_getitem
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.profiler_range import label_of

_ROUNDS = 7


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

    def now(self) -> float:
        """Seconds now, after all that was launched has run."""
        if self.waits:
            torch.cuda.synchronize()
        return time.perf_counter()

    def run_node(self, n: Node) -> Any:
        """Run one node on the clock."""
        if n.op != "call_function":
            return super().run_node(n)
        begin = self.now()
        result = super().run_node(n)
        self.times.setdefault(n, []).append(1e6 * (self.now() - begin))
        values = [*(self.env[source] for source in n.all_input_nodes if source in self.env), result]
        self.moved[n] = sum(_bytes(value) for value in values)
        return result


def _bytes(value: Any) -> int:
    # Opaque packed weights tell no element count of theirs; their shape is the plain weight's.
    return moved_bytes(value) if isinstance(value, Tensor) else 0


_MOVES = (*VIEWS, *CASTS, *CAT, *STACK, *PAD, *SPLIT)
_KINDS = {"data_movement": WorkKind.MOVE, "quantize": WorkKind.CONVERT}
"""Fused operators that do not compute."""


def profile_module(
    module: GraphModule,
    arguments: Sequence[Any],
    *,
    runtime: str,
    call: Callable[[], object] | None = None,
) -> Profile:
    """Time each operator of a module's call, as the median of some rounds.

    On a GPU each launch is waited for: short kernels look as long as their launch.

    Args:
        module: a lowered one, or any graph of torch.export.
        arguments: of its forward.
        runtime: what to call it.
        call: makes a whole call, where that is not of the arguments by position.
    """
    whole = partial(module, *arguments) if call is None else call
    timed = _Timed(module)
    timed.garbage_collect_values = False
    calls = []
    with torch.no_grad():
        for _ in range(_ROUNDS):
            timed.run(*arguments)
        for _ in range(_ROUNDS):
            begin = timed.now()
            whole()
            calls.append(1e6 * (timed.now() - begin))
    return Profile(
        tuple(
            NodeTime(
                node=node.meta.get(ANCHOR_KEY, node.name),
                module=module_path(node),
                kernel=kernel.op if (kernel := _kernel(node)) else operator_name(node),
                is_fused=kernel is not None,
                kind=_kind(node),
                cost=Cost(bytes=timed.moved[node], operations=_operations(node)),
                time_us=statistics.median(times),
            )
            for node, times in timed.times.items()
        ),
        runtime=runtime,
        call_us=statistics.median(calls),
    )


def _kind(node: Node) -> WorkKind:
    """The kind of work of an operator of a lowered or canonical graph."""
    kernel = _kernel(node)
    if kernel is not None:
        return _KINDS.get(kernel.op, WorkKind.INTEGER)
    if is_qdq(node) or node.target in CHOOSE_QPARAMS_OPS or "quantize" in operator_name(node):
        return WorkKind.CONVERT
    if is_getitem(node) or is_call(node, _MOVES) or aliased_argument(node) is not None:
        return WorkKind.MOVE
    value = node.meta.get("val")
    is_integer = isinstance(value, Tensor) and value.dtype in (torch.int8, torch.uint8, torch.int32)
    return WorkKind.INTEGER if is_integer else WorkKind.FLOAT


def _operations(node: Node) -> int:
    kernel = _kernel(node)
    found = kernel.cost(node).operations if kernel else 0
    return found if type(found) is int else 0  # symbolic: the sizes of the sample are not known
