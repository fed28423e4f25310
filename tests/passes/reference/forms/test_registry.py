"""The op tables of all backends against the integer forms."""

import pytest

import pt2e_quant as pq
from pt2e_quant.backends.artifact import is_installed
from pt2e_quant.graph.ops import Overload
from pt2e_quant.graph.terms import Op
from pt2e_quant.passes.reference.forms.functions import is_pointwise
from pt2e_quant.passes.reference.forms.registry import FORMS, WITHOUT_FORM

FORMED = {
    member.target if isinstance(member, Overload) else member
    for form in FORMS
    for member in form.operators
}


def targets_in(op):
    yield from (member.target for member in op.members)
    for inner in op.args:
        if isinstance(inner, Op):
            yield from targets_in(inner)


def is_of_one_tensor(target):
    """A table maps one tensor: a pointwise operator of two needs a form of its own."""
    return [str(given.type) for given in target._schema.arguments].count("Tensor") == 1


@pytest.mark.parametrize("name", ["cpu", "cuda", "onnx", "xnnpack"])
def test_op_table_when_walked_then_each_operator_has_a_form_or_is_listed_without_one(name):
    backend = pq.backends.get(name)
    if name != "cuda" and not all(map(is_installed, backend.packages)):
        pytest.skip(f"needs {backend.packages}")
    found = {target for _, op in backend.table.patterns() for target in targets_in(op)}
    assert len(found) > 20
    formed = {t for t in found if t in FORMED or (is_pointwise(t) and is_of_one_tensor(t))}
    assert sorted(map(str, found - formed - set(WITHOUT_FORM))) == []


def test_without_form_when_listed_then_has_no_form():
    assert not {target for target in WITHOUT_FORM if target in FORMED or is_pointwise(target)}
    assert all(WITHOUT_FORM.values())
