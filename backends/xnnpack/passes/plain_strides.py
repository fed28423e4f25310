"""Constants in the order of their axes: ExecuTorch takes the strides of others for a layout."""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute, constant_nodes
from pt2e_quant.graph.pipeline import PassResult, graph_pass
from pt2e_quant.graph.strides import has_plain_strides


@graph_pass(needs=(), gives=())
def plain_strides(gm: GraphModule) -> PassResult:
    """Store constants that are views, or in channels-last, as new tensors; the model's stay.

    Before:  bmm(p, x)          p: [4, 1, 16], strides (16, 64, 1)
    After:   bmm(p_plain, x)    p_plain: [4, 1, 16], strides (16, 16, 1)
    """
    editor = Editor(gm)
    made: dict[str, Node] = {}
    constants = constant_nodes(gm.graph)
    for node in [n for n in gm.graph.nodes if n.op == "get_attr" and n in constants]:
        tensor = attribute(gm, str(node.target))
        if not isinstance(tensor, Tensor) or has_plain_strides(tensor):
            continue
        if str(node.target) not in made:
            plain = tensor.detach().clone(memory_format=torch.contiguous_format)
            made[str(node.target)] = editor.constant(f"{node.target}_plain", plain, like=node)
        editor.replace(node, made[str(node.target)])
    return PassResult(editor.finish())
