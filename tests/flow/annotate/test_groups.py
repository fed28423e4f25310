"""Qparam groups by union-find."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.export import export

from pt2e_quant.core.errors import AnnotationError
from pt2e_quant.core.specs import (
    Q_ANNOTATION_KEY,
    DerivedQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    SharedQuantizationSpec,
)
from pt2e_quant.flow.annotate.groups import collect_groups
from pt2e_quant.observers.static.minmax import MinMaxObserver

SPEC = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)
OTHER = QuantizationSpec(torch.int8, MinMaxObserver, -127, 127, torch.per_tensor_symmetric)


def _chain(length):
    class Chain(torch.nn.Module):
        def forward(self, x):
            for _ in range(length):
                x = torch.tanh(x)
            return x

    gm = export(Chain(), (torch.randn(2),)).module()
    return gm, [n for n in gm.graph.nodes if n.op == "call_function"]


def _annotate(node, inputs=None, output=None, sharing=True):
    node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(inputs or {}, output, sharing, True)


def test_groups_when_output_and_input_specs_are_equal_then_one_group():
    gm, (a, b) = _chain(2)
    _annotate(a, output=SPEC)
    _annotate(b, {a: SPEC})
    groups = collect_groups(gm)
    assert groups[a] is groups[a, b]


def test_groups_when_specs_on_one_tensor_differ_then_apart():
    gm, (a, b) = _chain(2)
    _annotate(a, output=SPEC)
    _annotate(b, {a: OTHER})
    groups = collect_groups(gm)
    assert groups[a] is not groups[a, b]


def test_groups_when_implicit_sharing_is_off_then_apart():
    gm, (a, b) = _chain(2)
    _annotate(a, output=SPEC)
    _annotate(b, {a: SPEC}, sharing=False)
    groups = collect_groups(gm)
    assert groups[a] is not groups[a, b]


def test_groups_when_sharing_is_forward_and_transitive_then_one_group():
    gm, (a, b, c) = _chain(3)
    _annotate(a, output=SharedQuantizationSpec(b))
    _annotate(b, output=SharedQuantizationSpec(c))
    _annotate(c, output=SPEC)
    groups = collect_groups(gm)
    assert groups[a] is groups[b] is groups[c]
    assert groups[a].spec is SPEC


def test_groups_when_a_circle_has_one_spec_then_one_group():
    gm, (a, b, c) = _chain(3)
    _annotate(a, output=SharedQuantizationSpec(b))
    _annotate(b, {a: SPEC}, SharedQuantizationSpec(a))
    _annotate(c, output=SharedQuantizationSpec((a, b)))
    groups = collect_groups(gm)
    assert len({id(g) for g in groups.values()}) == 1


def test_groups_when_a_circle_has_no_spec_then_refused():
    gm, (a, b) = _chain(2)
    _annotate(a, output=SharedQuantizationSpec(b))
    _annotate(b, output=SharedQuantizationSpec(a))
    with pytest.raises(AnnotationError, match="shares in a circle"):
        collect_groups(gm)


def test_groups_when_a_node_shares_with_itself_then_refused():
    gm, (a,) = _chain(1)
    _annotate(a, output=SharedQuantizationSpec(a))
    with pytest.raises(AnnotationError, match="shares in a circle"):
        collect_groups(gm)


def test_groups_when_shared_with_a_place_without_spec_then_refused():
    gm, (a, b) = _chain(2)
    _annotate(b, output=SharedQuantizationSpec(a))
    with pytest.raises(AnnotationError, match='"tanh_1" shares with "tanh", which has no spec'):
        collect_groups(gm)


def test_groups_when_derived_from_an_unobserved_edge_then_refused():
    gm, (a, b) = _chain(2)
    spec = DerivedQuantizationSpec([(a, b)], lambda observers: None, torch.int32)
    _annotate(b, output=spec)
    with pytest.raises(AnnotationError, match='derives from "tanh -> tanh_1", which has no spec'):
        collect_groups(gm)


def test_groups_when_an_annotation_is_no_spec_then_refused():
    gm, (a,) = _chain(1)
    _annotate(a, output=object())
    with pytest.raises(AnnotationError, match="no quantization spec"):
        collect_groups(gm)


def test_groups_when_an_input_is_not_the_nodes_own_then_refused():
    gm, (a, b) = _chain(2)
    _annotate(a, {b: SPEC})
    with pytest.raises(AnnotationError, match='input "tanh_1", which is not one of the inputs'):
        collect_groups(gm)


@given(st.data())
def test_groups_when_sharing_is_random_then_the_connected_components(data):
    """Whatever the sharing, two outputs are in one group iff sharing connects them."""
    size = data.draw(st.integers(2, 8))
    gm, nodes = _chain(size)
    parents = [
        data.draw(st.one_of(st.none(), st.integers(0, size - 1).filter(lambda j, i=i: j != i)))
        for i in range(size)
    ]
    connected = list(range(size))
    for i, parent in enumerate(parents):
        if parent is not None:
            old, new = connected[i], connected[parent]
            connected = [new if c == old else c for c in connected]
    for i, parent in enumerate(parents):
        _annotate(
            nodes[i], output=SPEC if parent is None else SharedQuantizationSpec(nodes[parent])
        )
    rooted = {connected[i] for i, parent in enumerate(parents) if parent is None}
    if rooted != set(connected):
        with pytest.raises(AnnotationError, match="circle"):
            collect_groups(gm)
        return
    groups = collect_groups(gm)
    for i in range(size):
        for j in range(size):
            same = groups[nodes[i]] is groups[nodes[j]]
            assert same == (connected[i] == connected[j])
