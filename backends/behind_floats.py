"""Start a graph anew behind operators that a runtime computes in float, from its own integers.

A sum of floats depends on its order, which no runtime states: a result near a tie may be rounded to
the next integer, and every layer behind it has more of them. What is computed in integers can be
compared exactly all the same, from the integers that the runtime itself has there.
"""

from collections.abc import Sequence, Set
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen

from pt2e_quant.backends.sample_run import run_on_sample
from pt2e_quant.core.qdq import QdqKind, is_dequantize, is_quantize, kind_of_qdq, read_qparams
from pt2e_quant.core.qparams import quantize
from pt2e_quant.flow.calibrate.sample import Sample
from pt2e_quant.graph.ops import VIEWS, is_call
from pt2e_quant.graph.subgraphs import copy_graph
from pt2e_quant.passes.reference.forms.moves import CLAMPS


def quantized_floats(gm: GraphModule, floats: Set[str]) -> tuple[str, ...]:
    """The tensors that are quantized behind operators in float, in graph order.

    A dequantize of each tensor with a constant scale; where the scale is chosen at run time the
    real value itself, which no runtime rounds before it chooses.

    Args:
        gm: a canonical graph.
        floats: the names of its operators that a runtime computes in float.
    """
    found = (_read_behind(node, floats) for node in gm.graph.nodes)
    return tuple(dict.fromkeys(name for name in found if name is not None))


def _read_behind(node: Node, floats: Set[str]) -> str | None:
    if not is_quantize(node):
        return None
    value: Any = node.args[0]
    is_static = kind_of_qdq(node) is QdqKind.PER_TENSOR
    source = value
    while is_call(source, CLAMPS if is_static else VIEWS) and source.name not in floats:
        source = source.all_input_nodes[0]
    if source.name not in floats:
        return None
    if not is_static:
        return str(value.name)
    return next((user.name for user in node.users if is_dequantize(user)), None)


def given_behind(gm: GraphModule, names: Sequence[str]) -> GraphModule:
    """A graph that takes some tensors behind its inputs, as flat arguments.

    Of a dequantize it takes the integers, of another node its value. Behind its results it returns
    what it makes of these tensors itself, in real units. The given graph is not changed.

    Before:  y = dq(q(f(x)));  return g(y)
    After:   y = dq(given);  return g(y), dq(q(f(x)))

    Args:
        gm: a canonical graph that returns a flat tuple.
        names: of `quantized_floats`.
    """
    made = copy_graph(gm)
    graph = made.graph
    nodes = {node.name: node for node in graph.nodes}
    last = graph.find_nodes(op="placeholder")[-1]
    output = graph.output_node()
    returned: list[Any] = list(output.args[0])  # type: ignore[arg-type]  # a flat tuple
    for name in names:
        made_here = nodes[name]
        stored: Any = made_here.args[0] if is_dequantize(made_here) else made_here
        with graph.inserting_after(last):
            last = given = graph.placeholder(f"given_{name}")
        given.meta["val"] = stored.meta["val"]
        own = made_here
        if is_dequantize(made_here):
            with graph.inserting_before(output):
                own = graph.node_copy(made_here)
        for user in [user for user in stored.users if user is not own]:
            user.replace_input_with(stored, given)
        returned.append(own)
    output.args = (tuple(returned),)
    graph.set_codegen(CodeGen())
    made.recompile()
    return made


def run_given(gm: GraphModule, sample: Sample, given: Sequence[Tensor]) -> list[Any]:
    """The results of a graph of `given_behind`, or of its reference, on a sample."""
    return run_on_sample(gm, sample, lambda *leaves: gm(*leaves, *given))


def as_given(gm: GraphModule, name: str, real: Tensor) -> Tensor:
    """The argument of a graph of `given_behind` for a tensor in real units, by its name there."""
    node = next(node for node in gm.graph.nodes if node.name == name)
    return quantize(real, read_qparams(gm, node)) if is_dequantize(node) else real
