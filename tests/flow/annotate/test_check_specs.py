"""Annotations that cannot be meant: the error names node, module, source line, spec and fix."""

import re

import pytest
import torch
from torch import nn
from torch.export import export

from pt2e_quant.core.errors import AnnotationError, InputError, Pt2eQuantWarning
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.specs import (
    Q_ANNOTATION_KEY,
    DerivedQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    SharedQuantizationSpec,
)
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver

AFFINE, CHANNELS = torch.per_tensor_affine, torch.per_channel_symmetric
INT8 = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, AFFINE)
OTHER = QuantizationSpec(torch.uint8, MinMaxObserver, 0, 255, AFFINE)
X = torch.randn(2, 4)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, ids):
        y = torch.tanh(self.fc(x))
        return y[ids], ids + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x, ids):
        return self.inner(x, ids)


INPUTS = (X, torch.tensor([0, 1]))


class Rule:
    """A quantizer of one function; it is handed linear, tanh, the index and the add of integers."""

    def __init__(self, annotate) -> None:
        self.function = annotate

    def transform_for_annotation(self, gm):
        return gm

    def validate(self, gm):
        pass

    def annotate(self, gm):
        by_target = {str(n.target): n for n in gm.graph.nodes}
        self.gm = gm
        self.function(by_target["aten.linear.default"], by_target["aten.tanh.default"], self)
        return gm


def note(node, inputs=None, output=None):
    node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(inputs or {}, output, True, True)


def refused(annotate, *, strict=True):
    """The error of preparing the net; it names where and what to do."""
    with pytest.raises(AnnotationError) as caught:
        prepare_pt2e(export(Net(), INPUTS), Rule(annotate), strict=strict)
    text = str(caught.value)
    assert re.search(r"^  node    \w+ \(aten\.\w+", text, re.M), text
    assert re.search(r"^  module  inner", text, re.M), text
    assert re.search(r"^  source  \S+\.py:\d+  \S", text, re.M), text
    assert caught.value.fix
    return caught.value


def test_node_when_annotated_twice_differently_then_refused():
    def annotate(linear, tanh, rule):
        note(tanh, {linear: INT8}, INT8)
        note(tanh, {linear: OTHER}, INT8)

    error = refused(annotate)
    assert error.node_name == "tanh"
    assert "annotated twice: input linear was QuantizationSpec(dtype=torch.int8" in error.what
    assert "the second annotation says QuantizationSpec(dtype=torch.uint8" in error.what
    with pytest.warns(Pt2eQuantWarning, match="annotated twice"):
        prepare_pt2e(export(Net(), INPUTS), Rule(annotate), strict=False)


def test_second_annotation_when_it_leaves_out_a_spec_then_noted():
    def annotate(linear, tanh, rule):
        note(tanh, {linear: INT8}, INT8)
        note(tanh, output=INT8)

    prepared = prepare_pt2e(export(Net(), INPUTS), Rule(annotate))
    notes = provenance_of(prepared).notes
    assert "tanh: annotated twice, the second annotation leaves out input linear" in notes


@pytest.mark.parametrize("fresh", [False, True])
def test_second_annotation_when_it_says_the_same_or_more_then_accepted(fresh):
    def annotate(linear, tanh, rule):
        note(tanh, {linear: INT8})
        again = QuantizationSpec(torch.int8, MinMaxObserver.with_args(), -128, 127, AFFINE)
        note(tanh, {linear: again if fresh else INT8}, INT8)

    prepared = prepare_pt2e(export(Net(), INPUTS), Rule(annotate))
    assert all(type(n.meta) is dict for n in prepared.graph.nodes)


def test_sharing_when_the_node_is_not_in_the_graph_then_refused():
    stranger = next(iter(export(Net(), INPUTS).graph.nodes))

    def elsewhere(linear, tanh, rule):
        note(tanh, output=SharedQuantizationSpec(stranger))

    def gone(linear, tanh, rule):
        with rule.gm.graph.inserting_before(tanh):
            dead = rule.gm.graph.call_function(torch.ops.aten.sin.default, (linear,))
        note(tanh, {linear: SharedQuantizationSpec((linear, dead))}, INT8)
        rule.gm.graph.erase_node(dead)

    error = refused(elsewhere)
    assert f'"{stranger.name}" does not exist in this graph' in error.what
    assert "SharedQuantizationSpec" in error.what
    assert '"linear -> sin_default", and "sin_default" does not exist' in refused(gone).what


@pytest.mark.parametrize("place", ["linear", ("linear", "tanh"), None, 3])
def test_sharing_when_with_neither_node_nor_edge_then_refused(place):
    def annotate(linear, tanh, rule):
        note(tanh, output=SharedQuantizationSpec(place))

    assert f"{place!r}, which is neither a node nor an edge" in refused(annotate).what


def test_sharing_when_the_edge_does_not_exist_then_refused():
    def annotate(linear, tanh, rule):
        note(tanh, output=SharedQuantizationSpec((linear.args[0], tanh)))

    assert 'but "tanh" does not read "x"' in refused(annotate).what


def test_deriving_when_the_edge_has_no_spec_or_no_floats_then_refused():
    def derived(*places):
        return DerivedQuantizationSpec(list(places), lambda o: None, torch.int32)

    def bare(linear, tanh, rule):
        note(tanh, {linear: INT8}, derived(linear))

    def integers(linear, tanh, rule):
        (index,) = [n for n in rule.gm.graph.nodes if "add" in n.name]
        note(index, {index.args[0]: INT8})
        note(tanh, {linear: INT8}, derived((index.args[0], index)))

    assert 'derives from "linear", which has no spec' in refused(bare).what
    assert "derives from a tensor that is not observed: it holds integers" in refused(integers).what


class Loose:
    """A spec as another library may have it: no check of its own."""

    def __new__(cls, **fields):
        import dataclasses

        kind = dataclasses.make_dataclass("Spec", [(k, object) for k in fields], frozen=True)
        return kind(**fields)


def loose(**changes):
    fields = {
        "dtype": torch.int8, "observer_or_fake_quant_ctr": MinMaxObserver, "quant_min": -128,
        "quant_max": 127, "qscheme": AFFINE, "ch_axis": None, "is_dynamic": False,
    }  # fmt: skip
    return Loose(**fields | changes)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (5, -5, "quant_min 5 .. quant_max -5 is no range within torch.int8"),
        (-128, 300, "output: quant_min -128 .. quant_max 300 is no range within"),
    ],
)
def test_spec_when_its_range_is_invalid_then_refused(low, high, words):
    error = refused(
        lambda linear, tanh, rule: note(tanh, output=loose(quant_min=low, quant_max=high))
    )
    assert words in error.what
    assert "quant_min" in error.fix


@pytest.mark.parametrize("axis", [2, 7, -3])
def test_spec_when_its_channel_axis_is_out_of_range_then_refused(axis):
    spec = loose(
        observer_or_fake_quant_ctr=PerChannelMinMaxObserver, qscheme=CHANNELS, ch_axis=axis
    )
    error = refused(lambda linear, tanh, rule: note(linear, {linear.args[1]: spec}))
    assert f"has 2 dimensions, its channel axis is {axis} in Spec(" in error.what
    assert error.fix == "ch_axis from 0 to 1"


class NoObserver(nn.Module):
    def __init__(self, **kwargs) -> None:
        super().__init__()

    def forward(self, x):
        return x


@pytest.mark.parametrize(
    ("constructor", "words"),
    [
        (NoObserver, "NoObserver is no observer: it has no calculate_qparams"),
        (nn.ReLU, "ReLU cannot be made from"),
        ("minmax", "minmax cannot be made from"),
        (dict, "dict made a dict, not a module"),
        (None, "None cannot be made from"),
    ],
)
def test_spec_when_its_observer_is_unknown_then_refused(constructor, words):
    spec = loose(observer_or_fake_quant_ctr=constructor)
    error = refused(lambda linear, tanh, rule: note(tanh, output=spec))
    assert words in error.what


def test_observers_when_torchao_and_torch_ao_are_mixed_then_refused():
    new = pytest.importorskip("torchao.quantization.pt2e.observer")
    from torch.ao.quantization import observer as old

    class Derived(old.MinMaxObserver):
        """One's own, of the older generation."""

    def annotate(second):
        def rule(linear, tanh, rule):
            note(linear, {linear.args[0]: loose(observer_or_fake_quant_ctr=new.MinMaxObserver)})
            note(tanh, output=loose(observer_or_fake_quant_ctr=second, dtype=torch.quint8,
                                    quant_min=0, quant_max=255))  # fmt: skip

        return rule

    for second in (old.MinMaxObserver, Derived):
        error = refused(annotate(second))
        assert error.node_name == "tanh"
        assert f"of torch.ao ({second.__name__} at tanh) are mixed in one graph" in error.what
        with pytest.warns(Pt2eQuantWarning, match="mixed in one graph"):
            prepare_pt2e(export(Net(), INPUTS), Rule(annotate(second)), strict=False)
    prepare_pt2e(
        export(Net(), INPUTS),
        Rule(lambda linear, tanh, rule: (
            note(linear, {linear.args[0]: loose(observer_or_fake_quant_ctr=new.MinMaxObserver)}),
            note(tanh, output=INT8),
        )),
    )  # fmt: skip


def test_prepare_when_the_graph_is_of_symbolic_trace_then_refused_with_the_node():
    gm = torch.fx.symbolic_trace(Net())
    with pytest.raises(InputError, match="carries no fake values") as error:
        prepare_pt2e(gm, Rule(lambda linear, tanh, rule: None))
    assert "node    x (x)" in str(error.value)
    assert "not a symbolic_trace" in error.value.fix
