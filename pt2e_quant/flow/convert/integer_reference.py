"""A converted graph in exact integer arithmetic: the `reference` form."""

import copy
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_iter, tree_map_only

from pt2e_quant.accelerate.exact_products import install
from pt2e_quant.accelerate.pause_gc import pause_gc
from pt2e_quant.core.canonical import Form, verify_canonical
from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.integer_ops.profiles import DEFAULT, Profile, profile_named
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.graph.alias import mutated_buffers
from pt2e_quant.graph.pipeline import GraphPass, run_passes
from pt2e_quant.graph.subgraphs import bodies, copy_graph
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.qdq.duplicate_dequantize import duplicate_dequantize
from pt2e_quant.passes.reference.forms.site import Arithmetic
from pt2e_quant.passes.reference.write_integers import decompose_qdq, round_rows, write_integers

REFERENCE_OF_KEY = "reference_of"
"""The key of a reference graph's `meta` that holds a ReferenceOf; no file keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceOf:
    """The canonical graph of a reference graph; the tensors are shared.

    Args:
        graph: the canonical graph.
        arithmetic: how the integers were written.
    """

    graph: GraphModule
    arithmetic: Arithmetic


def integer_reference(
    gm: GraphModule,
    profile: Profile | str = DEFAULT,
    *,
    accumulator_bits: int = 32,
    form: Form = Form.CANONICAL,
    floats: Set[str] = frozenset(),
) -> GraphModule:
    """Write a canonical graph in integers.

    Operators without a form in `passes.reference.forms` are computed in float, between an explicit
    dequantize and quantize; notes of the provenance say why.

    Args:
        gm: of `convert_pt2e`; it stays as it is.
        profile: how the target rounds, or its name in `core.integer_ops.profiles`.
        accumulator_bits: 32, or 64 where sums of products may be longer than int32 holds.
        form: what the graph is in.
        floats: names of operators that the target computes in float, between a dequantize and a
            quantize: `artifact.float_operators(gm)`.

    Returns:
        A new module in reference form, verified, and in `eval()`, which shares the weights and has
        the buffers that it writes to itself. Integers have no gradient: where one is asked for, of
        an input that requires it or after `train()`, backward says so.

    Raises:
        InvariantError: the graph is not in that form.
        ConfigError: no profile has that name, accumulators have other bits, or the graph is an
            integer reference.
    """
    arithmetic = Arithmetic(profile_named(profile), accumulator_bits)
    passes = _passes(arithmetic, floats)
    if REFERENCE_OF_KEY in gm.meta:
        raise ConfigError(
            "this graph is an integer reference already",
            fix="give the graph of convert that it was made of",
        )
    verify_canonical(gm, form=form)
    source, gm = copy_graph(gm), _copy(gm)
    gm.meta[REFERENCE_OF_KEY] = ReferenceOf(graph=source, arithmetic=arithmetic)
    graphs = [gm, *(body.gm for body in bodies(gm))]
    with pause_gc():
        for graph in graphs:
            records = run_passes(graph, passes)
            notes = provenance_of(gm).notes
            notes += [f"{n.node}: {n.text}" for r in records for n in r.notes if n.skipped]
    for graph in graphs:
        verify_canonical(graph, form=Form.REFERENCE)
    nn.Module.train(gm, False)
    refuse_gradients(gm)
    install()
    return gm


def _copy(gm: GraphModule) -> GraphModule:
    """A deep copy that shares the tensors which no run writes."""
    named: dict[str, Tensor] = {}
    named |= dict(gm.named_parameters(remove_duplicate=False))
    named |= dict(gm.named_buffers(remove_duplicate=False))
    memo: dict[int, Any] = {id(value): value for value in named.values()}
    # Detached: a run outside of no_grad gives a buffer a history, which is not copied.
    written = (named[name] for name in mutated_buffers(gm) if name in named)
    memo |= {id(value): value.detach().clone() for value in written}
    made: GraphModule = copy.deepcopy(gm, memo)
    return made


def _passes(arithmetic: Arithmetic, floats: Set[str]) -> tuple[GraphPass, ...]:
    """The passes from canonical form to reference form, in order."""
    integers = write_integers(arithmetic, floats)
    written = decompose_qdq(arithmetic.profile.quantization)
    rows = round_rows(arithmetic.profile.rows)
    return duplicate_dequantize, integers, rows, written, drop_dead_constants


def refuse_gradients(gm: GraphModule) -> None:
    """Make a graph and its deep copies raise when a gradient is asked for."""
    if mark_results not in gm._forward_hooks.values():
        gm.register_forward_hook(mark_results, with_kwargs=True)
        gm._register_deepcopy_hook(refuse_gradients)


def mark_results(
    gm: GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
) -> Any:
    """A forward hook: results whose backward pass raises, if a gradient is asked for."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return outputs
    given = [v for v in tree_iter((args, kwargs)) if isinstance(v, Tensor) and v.requires_grad]
    if not given and not gm.training:
        return outputs
    cause = given[0] if given else torch.empty(0, requires_grad=True)

    def marked(value: Tensor) -> Tensor:
        if value.requires_grad or not value.is_floating_point():
            return value
        made: Tensor = _NoGradient.apply(value, cause)  # type: ignore[no-untyped-call]  # torch's
        return made

    return tree_map_only(Tensor, marked, outputs)


class _NoGradient(torch.autograd.Function):
    """A value whose gradient with respect to something else is refused."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, cause: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None]:
        raise UnsupportedError(
            "the integer reference has no gradient: what it computes in integers is constant to "
            "autograd",
            fix='train before convert: pq.prepare_qat_pt2e(program, quantizer, numerics="integer") '
            "computes the same integers and has a straight-through gradient",
        )
