"""The table of integer forms, which the pass, the audit and training read."""

from collections.abc import Callable, Mapping
from typing import Any

from torch.fx import Node

from pt2e_quant.core.recurrent_ops import RecurrentLayer
from pt2e_quant.graph.alias import state_writers
from pt2e_quant.graph.op_table import operator_name
from pt2e_quant.graph.ops import RECURRENT, Overload, aten, is_call
from pt2e_quant.passes.cleanup.unroll_loops import MOST_ROUNDS
from pt2e_quant.passes.reference.forms.arithmetic import ARITHMETIC_FORMS
from pt2e_quant.passes.reference.forms.comparisons import COMPARISON_FORMS
from pt2e_quant.passes.reference.forms.functions import FUNCTION_FORMS, TABLE, is_pointwise
from pt2e_quant.passes.reference.forms.moves import MOVE_FORMS, REQUANTIZE
from pt2e_quant.passes.reference.forms.pools import POOL_FORMS
from pt2e_quant.passes.reference.forms.products import PRODUCT_FORMS
from pt2e_quant.passes.reference.forms.site import IntegerForm
from pt2e_quant.passes.reference.forms.softmax import SOFTMAX_FORMS

__all__ = [
    "FORMS",
    "MOVES",
    "OTHER_OPERATORS",
    "REMEDIES",
    "REQUANTIZE",
    "WITHOUT_FORM",
    "form_of",
    "without_form",
]

FORMS: tuple[IntegerForm, ...] = (
    *PRODUCT_FORMS,
    *ARITHMETIC_FORMS,
    *POOL_FORMS,
    *FUNCTION_FORMS,
    *SOFTMAX_FORMS,
    *COMPARISON_FORMS,
    *MOVE_FORMS,
)
"""A new integer operator is an entry here; no operator is in two of them."""

MOVES = tuple(form for form in MOVE_FORMS if form.name in ("move", "join", "pad", "nearest"))
"""The forms that compute nothing."""

_CAST = "a cast between float types, which integers lack"

WITHOUT_FORM: Mapping[Callable[..., Any], str] = {
    aten._to_copy.default: _CAST,
    aten.to.device: _CAST,
    aten.to.dtype: _CAST,
    aten.to.dtype_layout: _CAST,
    aten.type_as.default: _CAST,
    aten.max_pool2d_with_indices.default: "it gives places too, which have no scale",
    RecurrentLayer: "its states are float from step to step",
}
"""Operators of a backend's op table without a form, with the reason."""

OTHER_OPERATORS = "write it with operators that have one, or decompose it before prepare"
"""The remedy for an operator without a form, where nothing better is known."""

_STEPS = (
    f"pq.IntegerQuantizer() writes up to {MOST_ROUNDS} steps out, whose products and gates have "
    "forms; a longer sequence in parts, or nn.LSTMCell and nn.GRUCell"
)

REMEDIES: Mapping[Callable[..., Any], str] = {
    RecurrentLayer: _STEPS,
    **{target: _STEPS for target in RECURRENT if callable(target)},
}
"""Remedies for some operators that have no form."""

_WRITES_STATE = (
    "it writes a buffer, which has no scale",
    "the state (a KV cache) as an input, which torch.cat appends to, and as a result; "
    "or int_only=False, which writes it in float",
)
"""The reason and the remedy of an operator that writes a buffer or an input."""

_BY_TARGET = {
    (member.target if isinstance(member, Overload) else member): form
    for form in FORMS
    for member in form.operators
}


def form_of(node: Node) -> IntegerForm | None:
    """The form of a call's operator, if it has one."""
    if node.op != "call_function":
        return None
    found = _BY_TARGET.get(node.target)  # type: ignore[arg-type]  # a callable, by op
    if found is None:
        return TABLE if is_pointwise(node.target) else None
    return found if is_call(node, found.operators) else None


def without_form(node: Node) -> tuple[str, str]:
    """The reason and the remedy of an operator that has no form."""
    assert callable(node.target)
    why = WITHOUT_FORM.get(node.target, "")
    remedy = REMEDIES.get(node.target, OTHER_OPERATORS)
    if node in state_writers(node.graph):
        why, remedy = _WRITES_STATE
    return f"{operator_name(node)} has no integer form" + (f": {why}" if why else ""), remedy
