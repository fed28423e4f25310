"""Ahead-of-time compilation of a fused program by torch's Inductor."""

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from pt2e_quant.backends.cpu.load_compiled import WRITTEN_BUFFERS
from pt2e_quant.backends.cpu.passes.module_passes import write_out
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.qdq import QuantizePerTensor
from pt2e_quant.kernels.onednn.operators import ConvSum, LinearSum, QConvSum, QLinear, aten

_SUMMAND, _UNARY = 6, 15


class SumsForInductor(CustomGraphPass):
    """Sums in the forms that Inductor compiles best, put in after its own fusions.

    A convolution's writes into its summand, which Inductor sees and orders reads before; a summand
    that is read later is copied. A linear's becomes an add, which is fused with what follows:
    oneDNN's costs more, and torch 2.13 leaks a handle of its summand in every call (its C++
    wrapper writes the argument out twice and frees one).
    """

    def __call__(self, graph: Graph) -> None:
        """Edit the graph that Inductor is about to generate code for."""
        order = {node: i for i, node in enumerate(graph.nodes)}
        for node in list(graph.nodes):
            if node.target is ConvSum:
                _write_summand(graph, node, order)
            elif node.target is LinearSum:
                _add_summand(graph, node)

    def uuid(self) -> str:
        """What Inductor's cache of compiled graphs knows the pass by."""
        return "pt2e_quant.sums_for_inductor.1"


def _write_summand(graph: Graph, node: Node, order: Mapping[Node, int]) -> None:
    summand: Any = node.args[_SUMMAND]
    readers = [order.get(reader, -1) for reader in summand.users]
    is_own = summand.op == "call_function" and not _is_view(summand)
    if not is_own or max(readers) > order[node] or node.args.count(summand) > 1:
        with graph.inserting_before(node):
            copied = graph.call_function(aten.clone.default, (summand,))
        copied.meta.update(summand.meta)
        node.args = (*node.args[:_SUMMAND], copied, *node.args[_SUMMAND + 1 :])
    node.target = QConvSum


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    returns = schema.returns if schema is not None else ()
    return any(result.alias_info is not None for result in returns)


def _add_summand(graph: Graph, node: Node) -> None:
    """qlinear(x, …) + summand, then perhaps relu, then perhaps a quantize."""
    scale, zero_point, dtype = node.args[8:11]
    real = node.meta["val"].to(torch.float32)

    def call(target: Any, *args: Any, value: Any = real) -> Node:
        made = graph.call_function(target, args)
        made.meta.update(node.meta)
        made.meta["val"] = value
        return made

    with graph.inserting_before(node):
        head = (*node.args[:_SUMMAND], node.args[_SUMMAND + 1])
        made = call(QLinear, *head, 1.0, 0, torch.float32, "none", [], "")
        made = call(aten.add.Tensor, made, node.args[_SUMMAND])
        if node.args[_UNARY] == "relu":
            made = call(aten.relu.default, made)
        if dtype is torch.uint8:
            limits = 0, 255, dtype
            value = node.meta["val"]
            made = call(QuantizePerTensor, made, scale, zero_point, *limits, value=value)
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def compile_program(program: ExportedProgram, buffers: Sequence[str] = ()) -> bytes:
    """Compile a program into the bytes of a .pt2, which `load_compiled` reads.

    Args:
        program: what to compile; constants are frozen into it, weights packed.
        buffers: dotted names of those that a call writes, for `load_compiled` to restore.

    Raises:
        UnsupportedError: this machine has no C++ compiler, or an operator of this package has no
            form in torch's own.
    """
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++", "cl")):
        raise UnsupportedError(
            "compile() needs a C++ compiler, and finds none on the PATH",
            fix="install g++ or clang, or run the artifact as it is",
        )
    settings = {
        "freezing": True,
        "post_grad_custom_post_pass": SumsForInductor(),
        "aot_inductor.metadata": {WRITTEN_BUFFERS: json.dumps([*buffers])},
    }
    with tempfile.TemporaryDirectory(prefix="pt2e_quant_") as folder:
        target = Path(folder) / "program.pt2"
        with torch.no_grad():  # Inductor freezes constants only where no gradient is asked for.
            torch._inductor.aoti_compile_and_package(
                write_out(program, buffers), package_path=str(target), inductor_configs=settings
            )
        return target.read_bytes()
