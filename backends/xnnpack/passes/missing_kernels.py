"""Operators that ExecuTorch cannot run are refused at the desk, by the line that calls them."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from executorch.runtime import Runtime
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.graph.ops import aten, is_call
from pt2e_quant.graph.subgraphs import bodies

__all__ = ["no_out_variant_refused", "refuse_loops", "refuse_missing_kernels", "refuse_volumes"]

_CONTROL_FLOW = ("cond", "map_impl", "scan")
_FIX = "write it with other operators, or compute it outside of the model"


def refuse_volumes(gm: GraphModule) -> None:
    """Stop at convolutions of volumes: ExecuTorch's kernel takes one and two dimensions.

    Raises:
        UnsupportedError: naming the first.
    """
    for node in gm.graph.nodes:
        if is_call(node, (aten.conv3d.default, aten.conv_transpose3d.input)):
            raise UnsupportedError(
                "neither XNNPACK nor ExecuTorch convolves volumes", node=node, fix=_FIX
            )


def refuse_loops(gm: GraphModule) -> None:
    """Stop at control flow that ExecuTorch's programs cannot say: they have cond, map and scan.

    Raises:
        UnsupportedError: naming the first.
    """
    for body in bodies(gm):
        name = str(getattr(body.call.target, "__name__", body.call.target))
        if name not in _CONTROL_FLOW:
            raise UnsupportedError(
                f"ExecuTorch's programs have no {name}",
                node=body.call,
                fix="write the loop with scan or map, or in Python with a fixed number of rounds; "
                "ONNX Runtime and the CPU take it as it is",
            )


def refuse_missing_kernels(gm: GraphModule, kernels: Iterable[str]) -> None:
    """Stop at operators outside of the delegate that the runtime at hand has no kernel for.

    Args:
        gm: the canonical graph, to name the line.
        kernels: "namespace.operator" of the program's own calls.

    Raises:
        UnsupportedError: naming the first.
    """
    known = {n.split(".")[0] for n in Runtime.get().operator_registry.operator_names}
    for kernel in kernels:
        name = kernel.replace(".", "::", 1)
        if name not in known:
            raise _no_kernel(gm, name)


@contextmanager
def no_out_variant_refused(gm: GraphModule) -> Iterator[None]:
    """Name the line behind ExecuTorch's complaint of an operator without an out variant.

    Raises:
        UnsupportedError: instead of its RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        found = re.search(r"Missing out variants: \{'(\w+::\w+)", str(error))
        if found is None:
            raise
        raise _no_kernel(gm, found[1]) from error


def _no_kernel(gm: GraphModule, name: str) -> UnsupportedError:
    node = next((n for n in gm.graph.nodes if _name(n) == name), None)
    return UnsupportedError(f"ExecuTorch has no kernel for {name}", node=node, fix=_FIX)


def _name(node: Node) -> str:
    """The operator that a node calls, as "namespace::name"; empty for other nodes."""
    return str(node.target._schema.name) if isinstance(node.target, OpOverload) else ""
