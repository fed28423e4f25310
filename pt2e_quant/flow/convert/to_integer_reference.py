"""A converted graph in exact integer arithmetic: the `reference` form."""

from torch.fx import GraphModule

from pt2e_quant.accelerate.pause_gc import pause_gc
from pt2e_quant.core.canonical import Form, verify_canonical
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.graph.pipeline import GraphPass, run_passes
from pt2e_quant.graph.subgraphs import bodies
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize
from pt2e_quant.passes.reference.decompose_qdq import decompose_qdq
from pt2e_quant.passes.reference.integer_reference import integer_reference

__all__ = ["REFERENCE_PASSES", "to_integer_reference"]

REFERENCE_PASSES: tuple[GraphPass, ...] = (
    duplicate_dequantize,
    integer_reference,
    decompose_qdq,
    drop_dead_constants,
)
"""From canonical form to reference form, in this order."""


def to_integer_reference(gm: GraphModule, form: Form = Form.CANONICAL) -> GraphModule:
    """Write a canonical graph in integers, in place.

    What no definition of `core.integer_ops` covers is computed in float between a dequantize and a
    quantize that are written out; the notes of the provenance say why.

    Args:
        gm: of `convert_pt2e`.
        form: what it is in.

    Returns:
        The same module, in reference form, verified.

    Raises:
        InvariantError: the graph is not in that form.
    """
    verify_canonical(gm, form=form)
    graphs = [gm, *(body.gm for body in bodies(gm))]
    with pause_gc():
        for graph in graphs:
            records = run_passes(graph, REFERENCE_PASSES)
            notes = provenance_of(gm).notes
            notes += [f"{n.node}: {n.text}" for r in records for n in r.notes if n.skipped]
    for graph in graphs:
        verify_canonical(graph, form=Form.REFERENCE)
    return gm
