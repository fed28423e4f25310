"""Pad linears with zero columns, so that groups of a given size divide their weights."""

from collections.abc import Callable

from torch.fx import GraphModule, Node
from torch.nn import functional as F

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import LINEAR, argument, aten, is_call
from pt2e_quant.graph.pipeline import GraphPass, Note, PassResult, graph_pass


def pad_linears(group_size_of: Callable[[Node], int | None]) -> GraphPass:
    """The pass that pads each linear to a multiple of its group size.

    Before:  linear(x, w, b),                                     w: [rows, 100]
    After:   linear(pad(x, [0, 28]), w', b),                      w': [rows, 128]

    Args:
        group_size_of: the group size that a linear's weight will get, None for no groups.
    """

    @graph_pass(needs=(), gives=())
    def pad_linears(gm: GraphModule) -> PassResult:
        editor = Editor(gm)
        notes = []
        for node in [n for n in gm.graph.nodes if is_call(n, LINEAR)]:
            weight, group_size = argument(node, "weight"), group_size_of(node)
            value = constant_of(gm, weight) if isinstance(weight, Node) else None
            if group_size is None or value is None or value.shape[-1] % group_size == 0:
                continue
            missing = -value.shape[-1] % group_size
            source = argument(node, "input")
            padded = editor.call(aten.pad.default, source, [0, missing], like=node, before=node)
            name = str(weight.target) if weight.op == "get_attr" else weight.name
            held = editor.constant(f"{name}_padded", F.pad(value, (0, missing)), like=weight)
            node.replace_input_with(source, padded)
            node.replace_input_with(weight, held)
            editor.discard([weight])
            notes.append(
                Note(node.name, f"{missing} zero columns added for groups of {group_size}")
            )
        return PassResult(editor.finish(), tuple(notes))

    return pad_linears
