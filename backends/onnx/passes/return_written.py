"""Inputs that a graph writes, as further outputs: an ONNX model cannot write what it is given."""

from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.core.read_capture import CAPTURE_KEY, capture_of
from pt2e_quant.graph.alias import written_inputs


def return_written(gm: GraphModule) -> tuple[int, ...]:
    """Return behind the results what a graph leaves in inputs that it writes; which those are.

    The graph is edited, and its capture with it; it must return a flat tuple.

    Before:  add_(x, 1); return (y,)
    After:   h = clone(x); add_(h, 1); return (y, h)
    """
    given = [node for node in gm.graph.nodes if node.op == "placeholder"]
    written = written_inputs(gm.graph)
    if not written:
        return ()
    held = []
    with gm.graph.inserting_after(given[-1]):
        for index in written:
            clone = gm.graph.call_function(torch.ops.aten.clone.default, (given[index],))
            clone.meta = dict(given[index].meta)
            given[index].replace_all_uses_with(clone, lambda user, made=clone: user is not made)
            held.append(clone)
    output = gm.graph.output_node()
    results = output.args[0]
    assert isinstance(results, tuple)
    output.args = ((*results, *held),)
    out_spec = pytree.tree_structure(tuple(range(len(results) + len(held))))
    gm.meta[CAPTURE_KEY] = replace(capture_of(gm), out_spec=out_spec)
    codegen: Any = gm.graph._codegen
    if getattr(codegen, "pytree_info", None) is not None:
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=out_spec)
    gm.graph.lint()
    gm.recompile()
    return written
