"""Give operators constants of their own where ExecuTorch's serializer would mix them up."""

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.xnnpack.passes.kernel_forms import GEMMS
from pt2e_quant.backends.xnnpack.passes.refloat import bias_of
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute, constant_nodes
from pt2e_quant.graph.ops import is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.graph.subgraphs import direct_bodies


@graph_pass(needs=(HAS_VALUES,), gives=())
def own_biases(gm: GraphModule) -> PassResult:
    """Give each convolution or linear a bias of its own where layers run several times.

    ExecuTorch's serializer (1.4) makes the integers of a constant once: on the step of the first
    operator that reads it, whatever the scales of the others.

    Before:  conv(x, w, b), conv(y, w, b)
    After:   conv(x, w, b), conv(y, w, b_1)
    """
    editor = Editor(gm)
    notes, seen = [], set()
    for node in [n for n in gm.graph.nodes if is_call(n, GEMMS)]:
        bias = bias_of(node)
        if not isinstance(bias, Node) or bias.op != "get_attr":
            continue
        value = attribute(gm, str(bias.target))
        if not isinstance(value, Tensor):
            continue
        if id(value) in seen:
            held = editor.constant(str(bias.target), value.detach().clone(), like=bias)
            node.replace_input_with(bias, held)
            notes.append(Note(node.name, "its bias is a copy"))
        seen.add(id(value))
    return PassResult(editor.finish(), tuple(notes))


@graph_pass(needs=(HAS_VALUES,), gives=())
def own_operands(gm: GraphModule) -> PassResult:
    """Give control flow constants of its own where operators outside read them too.

    ExecuTorch's partitioner (1.4) moves a constant into the delegate that reads it, and stops where
    a call that no delegate takes reads it as well. Equal constants of a file are stored once.

    Before:  linear(x, w, b), cond(p, yes, no, (y, b))
    After:   linear(x, w, b), cond(p, yes, no, (y, b_1))
    """
    editor = Editor(gm)
    calls = {body.call for body in direct_bodies(gm)}
    constants = constant_nodes(gm.graph)
    named = [n for n in gm.graph.nodes if n.op == "get_attr" and n in constants]
    held = {node: attribute(gm, str(node.target)) for node in named}
    # By tensor: one may stand under several names, which torch.export makes one again.
    outside = {id(held[n]) for n in held if not calls.issuperset(n.users)}
    copies: dict[int, Node] = {}
    for source, value in held.items():
        if not isinstance(value, Tensor) or id(value) not in outside:
            continue
        for call in [user for user in source.users if user in calls]:
            if id(value) not in copies:
                copy = value.detach().clone()
                copies[id(value)] = editor.constant(str(source.target), copy, like=source)
            call.replace_input_with(source, copies[id(value)])
    return PassResult(editor.finish())


@graph_pass(needs=(HAS_VALUES,), gives=())
def own_storage(gm: GraphModule) -> PassResult:
    """Copy constants that are a part of a larger tensor's memory.

    ExecuTorch's serializer (1.4) writes the memory from its beginning, wherever a constant begins,
    and all of it: operators compute with another part's values, and the file grows.

    Before:  linear(x, stack[1]), stack: float[8, N, K]
    After:   linear(x, stack[1].clone())
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if n.op == "get_attr" and n.users]:
        value = attribute(gm, str(node.target))
        if not isinstance(value, Tensor) or value.untyped_storage().nbytes() == value.nbytes:
            continue
        held = editor.rebind(node, value.detach().clone(), reader=next(iter(node.users)))
        if held is not node:
            editor.replace(node, held)
        notes.append(Note(node.name, "a part of a larger tensor is copied"))
    return PassResult(editor.finish(), tuple(notes))


OWN_CONSTANTS = (own_biases, own_operands, own_storage)
"""The passes in the order they run in."""
