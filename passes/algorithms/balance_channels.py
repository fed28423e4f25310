"""Even out the channels of linears' inputs for qparams found at run time, from weights alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.granularity import PerChannel, PerGroup
from pt2e_quant.core.schemes import Scheme
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import LINEAR, argument, is_call
from pt2e_quant.graph.pipeline import GraphPass, Note, PassResult, graph_pass
from pt2e_quant.passes.algorithms.balance_scales import Balance, Rounding, choose_balance
from pt2e_quant.passes.algorithms.channel_moments import ChannelMoments
from pt2e_quant.passes.algorithms.channel_sizes import ChannelSizes, channel_sizes
from pt2e_quant.passes.algorithms.factor_targets import (
    Rows,
    Target,
    divide,
    own_weight,
    readers_of_storage,
    rebind,
    target_of,
)

__all__ = ["BALANCED_KEY", "balance_channels"]

BALANCED_KEY = "pt2e_quant.balanced"
"""The key of `node.meta` of a linear whose input was balanced: what was done."""

LEAST_GAIN = 1.1
"""By what factor the expected error must fall."""

SchemeFor = Callable[[Node], Scheme | None]


@dataclass(frozen=True, slots=True)
class _Plan:
    linears: tuple[Node, ...]
    target: Target
    balance: Balance


def balance_channels(scheme_for: SchemeFor) -> GraphPass:
    """The pass that divides linears' inputs by a factor per channel, and multiplies their weights.

    Runs on a float graph, before annotation; it needs no data and runs nothing. How large channels
    are is estimated from the weights before them (`channel_sizes`), and the factors are those with
    the least expected rounding error (`balance_scales`). They go into the norm that makes the
    input, into the rows of a linear (also one factor of a gated product, or before a relu), or,
    where a residual reads the norm too, into a multiplication. Only linears that get integer
    weights by `scheme_for`, and inputs in float or rounded at run time, take part.

    Before:  y = layer_norm(x, g, b);          linear(y, w)
    After:   y = layer_norm(x, g / f, b / f);  linear(y, w * f)

    Args:
        scheme_for: the scheme that a linear will get, None if it stays float.
    """

    @graph_pass()
    def balance_channels(gm: GraphModule) -> PassResult:
        sites = _sites(gm, scheme_for)
        readers, moments = readers_of_storage(gm), ChannelMoments(gm)
        plans, notes = [], []
        for source, linears in sites.items():
            plan = _plan(moments, source, linears, scheme_for, readers)
            if isinstance(plan, _Plan):
                plans.append(plan)
                notes.append(Note(linears[0].name, plan.balance.step))
            else:
                notes.append(Note(linears[0].name, plan, skipped=True))
        editor = Editor(gm)
        for plan in plans:  # after all estimates: they read the weights as they were
            _apply(editor, plan)
        return PassResult(editor.finish(), tuple(notes))

    return balance_channels


def _sites(gm: GraphModule, scheme_for: SchemeFor) -> dict[Node, list[Node]]:
    """Inputs, and the linears that read them and are rounded without data."""
    found: dict[Node, list[Node]] = {}
    for node in gm.graph.nodes:
        if is_call(node, LINEAR) and _rounding_of(scheme_for(node)) is not None:
            found.setdefault(argument(node, "input"), []).append(node)
    return found


def _rounding_of(scheme: Scheme | None) -> Rounding | None:
    """What a scheme rounds in a linear; None where balancing has no say.

    Static inputs have calibrated statistics, which tell more (`smooth_quant`); weights in
    floats, codebooks or blocks round by other rules.
    """
    weight = scheme.weight if scheme is not None else None
    given = scheme.input if scheme is not None else None
    if weight is None or weight.format is not None:
        return None
    granularity = weight.granularity
    if not isinstance(granularity, PerChannel | PerGroup):
        return None
    if given is not None and (given.format is not None or not given.is_dynamic):
        return None
    low, high = weight.range
    return Rounding(
        weight_steps=(high - low) / 2,
        group_size=granularity.group_size if isinstance(granularity, PerGroup) else None,
        rounds_input=given is not None,
        is_affine=given is not None and not given.symmetric,
    )


def _plan(
    moments: ChannelMoments,
    source: Node,
    linears: Sequence[Node],
    scheme_for: SchemeFor,
    readers: Mapping[int, int],
) -> _Plan | str:
    """What to do at an input, or why nothing."""
    if any(BALANCED_KEY in linear.meta for linear in linears):
        return "it was balanced before"
    kinds = {_rounding_of(scheme_for(linear)) for linear in linears}
    rounding = next(iter(kinds))
    if len(kinds) > 1 or rounding is None:
        return "its readers have different schemes"
    weights: list[Tensor] = []
    for linear in linears:
        value = own_weight(moments.gm, linear, readers)
        if isinstance(value, str):
            return value
        weights.append(value)
    target = target_of(moments.gm, source, linears, readers, moments.roots)
    if isinstance(target, str):
        return target
    sizes = channel_sizes(moments, source)
    if sizes is None or not _is_usable(sizes, weights[0].shape[1]):
        return "the weights before it do not tell its channels' sizes"
    keeps_sign = isinstance(target, Rows) and target.keeps_sign
    balance = choose_balance(torch.cat(weights), sizes, rounding, keeps_sign=keeps_sign)
    if not balance.error_before > balance.error * LEAST_GAIN:
        return "no factor per channel lowers the expected error enough"
    return _Plan(tuple(linears), target, balance.exact_in(weights[0].dtype))


def _is_usable(sizes: ChannelSizes, channels: int) -> bool:
    reach = sizes.above + sizes.below
    return len(reach) == channels and bool(reach.isfinite().all()) and float(reach.max()) > 0


def _apply(editor: Editor, plan: _Plan) -> None:
    factors = plan.balance.factors
    for linear in plan.linears:
        rebind(editor, linear, argument(linear, "weight"), lambda weight: weight * factors)
        linear.meta[BALANCED_KEY] = plan.balance.step
    divide(editor, plan.target, factors, plan.linears)
