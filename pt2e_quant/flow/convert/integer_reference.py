"""A converted graph in exact integer arithmetic: the `reference` form."""

from torch.fx import GraphModule

from pt2e_quant.accelerate.pause_gc import pause_gc
from pt2e_quant.core.canonical import Form, verify_canonical
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.integer_ops.profiles import DEFAULT, Profile, profile_named
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.graph.pipeline import GraphPass, run_passes
from pt2e_quant.graph.subgraphs import bodies
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize
from pt2e_quant.passes.reference.decompose_qdq import decompose_qdq
from pt2e_quant.passes.reference.forms.site import Arithmetic
from pt2e_quant.passes.reference.write_integers import write_integers

__all__ = ["integer_reference"]

_BITS = (32, 64)


def integer_reference(
    gm: GraphModule,
    profile: Profile | str = DEFAULT,
    *,
    accumulator_bits: int = 32,
    form: Form = Form.CANONICAL,
) -> GraphModule:
    """Write a canonical graph in integers, in place.

    What no form of `passes.reference.forms` covers is computed in float between a dequantize and a
    quantize that are written out; the notes of the provenance say why.

    Args:
        gm: of `convert_pt2e`.
        profile: how the target rounds, or its name in `core.integer_ops.profiles`.
        accumulator_bits: 32, or 64 where sums of products may be longer than int32 holds.
        form: what the graph is in.

    Returns:
        The same module, in reference form, verified.

    Raises:
        InvariantError: the graph is not in that form.
        ConfigError: no profile has that name, or accumulators have other bits.
    """
    if accumulator_bits not in _BITS:
        raise ConfigError(f"accumulator_bits must be 32 or 64, found {accumulator_bits!r}")
    passes = _passes(Arithmetic(profile_named(profile), accumulator_bits))
    verify_canonical(gm, form=form)
    graphs = [gm, *(body.gm for body in bodies(gm))]
    with pause_gc():
        for graph in graphs:
            records = run_passes(graph, passes)
            notes = provenance_of(gm).notes
            notes += [f"{n.node}: {n.text}" for r in records for n in r.notes if n.skipped]
    for graph in graphs:
        verify_canonical(graph, form=Form.REFERENCE)
    return gm


def _passes(arithmetic: Arithmetic) -> tuple[GraphPass, ...]:
    """From canonical form to reference form, in this order."""
    integers = write_integers(arithmetic)
    return duplicate_dequantize, integers, decompose_qdq, drop_dead_constants
