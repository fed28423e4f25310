"""Views that no channels-last tensor can give become reshapes."""

from typing import Any

import torch
from torch.fx import GraphModule

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import PassResult, graph_pass

aten: Any = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


@graph_pass(needs=(), gives=())
def reshape_views(gm: GraphModule) -> PassResult:
    """Let views copy where the layout asks for it: convolutions give channels-last results here.

    Before:  view(conv2d(x, w), [4, 128])
    After:   reshape(conv2d(x, w), [4, 128])
    """
    editor = Editor(gm)
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in _VIEWS:
            node.target = aten.reshape.default
            editor.changed = True
    return PassResult(changed=editor.finish())
