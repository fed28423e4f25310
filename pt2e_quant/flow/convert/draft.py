"""A draft of the q/dq graph, from which passes tell what is to compute in float in the end."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.dtypes import used_limits
from pt2e_quant.core.qdq import is_quantize
from pt2e_quant.core.qparams import QParams
from pt2e_quant.flow.convert.emit_qdq import emit_static
from pt2e_quant.flow.prepare.prepared import observed_node, observers_of, prepared_state
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import PassRecord, run_passes
from pt2e_quant.graph.subgraphs import copy_with_records
from pt2e_quant.passes.algorithms.algorithm_graph import has_integers
from pt2e_quant.passes.algorithms.paired_run import fixed_nodes

CUSTOM_KEY = "custom"
"""The key of `node.meta` with the marks that passes leave for a lowering."""


def place_in_float(gm: GraphModule) -> Sequence[PassRecord]:
    """Take out the observers whose q/dq the passes that place operators would take out.

    Algorithms correct the errors of what is rounded. One that has corrected the error of a
    quantize makes an error where that is taken out behind it.

    Before:  conv -> observer -> conv, which is faster in float with the conversions around it
    After:   conv -> conv, both marked as the passes mark them

    Args:
        gm: prepared; its observers may have seen no data.

    Returns:
        What the passes did.
    """
    passes = prepared_state(gm).placing
    draft = draft_of(gm) if passes else None
    if draft is None:
        return ()
    before = _quantized(draft)
    records = run_passes(draft, passes)
    gone = before - _quantized(draft)
    marks = {n.name: n.meta[CUSTOM_KEY] for n in draft.graph.nodes if CUSTOM_KEY in n.meta}
    for node, _ in list(observers_of(gm)):
        source = observed_node(node)
        if source.name in gone:
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
            gm.delete_submodule(str(node.target))
    for node in gm.graph.nodes:
        if node.name in marks:
            node.meta[CUSTOM_KEY] = marks[node.name]
    return records


def draft_of(gm: GraphModule) -> GraphModule | None:
    """A copy of a prepared graph with q/dq of scale 1 for the observers of its activations.

    It takes no walk over weights, which stay float. None where an activation has another form
    than integers of one static scale.

    Args:
        gm: prepared.
    """
    fixed = {node.name for node in fixed_nodes(gm.graph)}
    watched = [(node, o) for node, o in observers_of(gm) if node.name not in fixed]
    if not all(_is_plain(observer) for _, observer in watched):
        return None
    made = copy_with_records(gm)
    editor = Editor(made)
    for node, observer in list(observers_of(made)):
        readers, source = list(node.users), observed_node(node)
        if node.name in fixed:
            node.replace_all_uses_with(source)
        else:
            quantized = emit_static(editor, node, source, _of_scale_one(observer))
            for reader in readers:
                reader.replace_input_with(node, quantized.dequantize(editor, of=node))
        made.graph.erase_node(node)
    editor.finish()
    return made


def _is_plain(observer: Any) -> bool:
    return has_integers(observer) and observer.qscheme in (
        torch.per_tensor_affine,
        torch.per_tensor_symmetric,
    )


def _of_scale_one(observer: Any) -> QParams:
    low, high = used_limits(observer)
    return QParams(
        scale=torch.ones(1),
        zero_point=torch.zeros(1, dtype=torch.int32),
        quant_min=low,
        quant_max=high,
        dtype=observer.dtype,
    )


def _quantized(gm: GraphModule) -> set[str]:
    """The names of the values that a quantize reads."""
    read = (node.args[0] for node in gm.graph.nodes if is_quantize(node))
    return {value.name for value in read if isinstance(value, Node)}
