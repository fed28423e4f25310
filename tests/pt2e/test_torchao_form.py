"""Graphs that quantizers of other packages get: of the form that torchao's PT2E gives."""

import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.export import export

from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.ops import aten
from pt2e_quant.pt2e.observer import (
    MinMaxObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
    default_observer,
)
from pt2e_quant.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from pt2e_quant.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
    SharedQuantizationSpec,
)

qdq = torch.ops.quantized_decomposed
TAG = "quantization_tag"
INT8 = QuantizationSpec(torch.int8, MinMaxObserver, -128, 127, torch.per_tensor_affine)
WEIGHT = QuantizationSpec(
    torch.int8, PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, ch_axis=0
)
DYNAMIC = QuantizationSpec(
    torch.int8, PlaceholderObserver, -128, 127, torch.per_tensor_affine, is_dynamic=True
)


class ByOperator(Quantizer):
    """Annotates the calls of some operators, and tags them with their name."""

    def __init__(self, targets, activation=INT8, weight=WEIGHT, output=None):
        self.targets, self.activation, self.weight = targets, activation, weight
        self.output = output

    def annotate(self, model):
        for node in model.graph.nodes:
            if node.target in self.targets:
                inputs = {
                    n: self.weight if n.op == "get_attr" else self.activation
                    for n in node.all_input_nodes
                    if not str(n.target).endswith("bias")
                }
                note = QuantizationAnnotation(inputs, self.output, _annotated=True)
                node.meta[Q_ANNOTATION_KEY] = note
                for tagged in (node, *(n for n in inputs if n.op == "get_attr")):
                    tagged.meta[TAG] = f"tag {node.name}"
        return model

    def validate(self, model):
        pass


class Run(nn.Module):
    def __init__(self, function, **children):
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args):
        return self.function(self, *args)


def converted(model, inputs, quantizer):
    prepared = prepare_pt2e(export(model.eval(), inputs).module(), quantizer)
    prepared(*inputs)
    return convert_pt2e(prepared)


def calls(gm, target):
    return [node for node in gm.graph.nodes if node.target == target]


def test_dynamic_input_when_read_by_several_then_one_dequantize_for_all():
    model = Run(lambda m, x: m.a(x) + m.b(x), a=nn.Linear(4, 3), b=nn.Linear(4, 3))
    gm = converted(model, (torch.randn(2, 4),), ByOperator([aten.linear.default], DYNAMIC))
    (shared,) = calls(gm, qdq.dequantize_per_tensor.tensor)
    assert len(shared.users) == 2
    assert len(calls(gm, qdq.dequantize_per_channel.default)) == 2


def test_static_input_when_read_by_several_then_a_dequantize_for_each():
    model = Run(lambda m, x: m.a(x) + m.b(x), a=nn.Linear(4, 3), b=nn.Linear(4, 3))
    gm = converted(model, (torch.randn(2, 4),), ByOperator([aten.linear.default]))
    assert len(calls(gm, qdq.dequantize_per_tensor.default)) == 2


@pytest.mark.parametrize(
    ("activation", "target"),
    [
        (nn.ReLU(inplace=True), aten.relu_.default),
        (nn.Hardtanh(0.0, 6.0, inplace=True), aten.hardtanh_.default),
        (nn.SiLU(inplace=True), aten.silu_.default),
        (nn.ReLU(), aten.relu.default),
    ],
)
def test_activation_when_in_place_then_in_place_in_the_converted_graph(activation, target):
    model = nn.Sequential(nn.Linear(4, 3), activation)
    x = torch.randn(2, 4)
    gm = converted(model, (x,), ByOperator([aten.linear.default]))
    assert len(calls(gm, target)) == 1
    torch.testing.assert_close(gm(x), gm(x))


def test_activation_when_its_input_has_another_reader_then_out_of_place():
    def function(m, x):
        y = m.a(x)
        kept = y * 2
        y.relu_()
        return kept + y, y.sum()

    x = torch.randn(2, 4)
    model = Run(function, a=nn.Linear(4, 3))
    gm = converted(model, (x,), ByOperator([aten.linear.default]))
    assert not calls(gm, aten.relu_.default)
    expected = model(x)
    for found, wanted in zip(gm(x), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.1)


def test_constant_when_no_layer_reads_it_then_computed_as_in_the_model():
    table = nn.Parameter(torch.randn(3, 3))
    model = Run(lambda m, x: m.a(x) + m.table.exp(), a=nn.Linear(4, 3))
    model.table = table
    gm = converted(model, (torch.randn(3, 4),), ByOperator([aten.linear.default]))
    assert len(calls(gm, aten.exp.default)) == 1


def test_constant_when_observed_then_folded_into_its_integers():
    model = Run(lambda m, x: m.a(x) + m.table.exp(), a=nn.Linear(4, 3))
    model.table = nn.Parameter(torch.randn(3, 3))
    x = torch.randn(3, 4)
    gm = converted(model, (x,), ByOperator([aten.linear.default, aten.add.Tensor]))
    assert not calls(gm, aten.exp.default)
    torch.testing.assert_close(gm(x), model(x), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("small", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_spec_when_it_asks_for_float8_then_stored_in_it(dtype, small):
    ends = int(torch.finfo(small).min), int(torch.finfo(small).max)
    spec = QuantizationSpec(small, default_observer, *ends, torch.per_tensor_affine)
    weight = QuantizationSpec(small, MinMaxObserver, *ends, torch.per_tensor_symmetric)
    model = nn.Conv2d(3, 4, 1, dtype=dtype)
    x = torch.randn(2, 3, 4, 4, dtype=dtype)
    gm = converted(model, (x,), ByOperator([aten.conv2d.default], spec, weight, spec))
    assert len(calls(gm, qdq.quantize_per_tensor.default)) == 2
    assert all(node.args[-1] == small for node in calls(gm, qdq.dequantize_per_tensor.default))
    assert gm.weight_q.dtype is small
    torch.testing.assert_close(gm(x), model(x), rtol=0.2, atol=0.4)


def test_tags_when_converted_then_on_each_qdq_of_the_operator():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    quantizer = ByOperator([aten.linear.default], output=INT8)
    gm = converted(model, (torch.randn(2, 4),), quantizer)
    for linear in calls(gm, aten.linear.default):
        own = linear.meta[TAG]
        value, weight = linear.args[:2]
        assert [n.meta.get(TAG) for n in (value, weight, weight.args[0])] == [own] * 3
        (quantize,) = linear.users
        assert quantize.meta[TAG] == own
    first = calls(gm, qdq.quantize_per_tensor.default)[0]
    assert first.args[0].op == "placeholder"
    assert TAG not in first.meta


class ThroughView(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(2, 4))

    def forward(self, x, index):
        row = self.state.select(0, 0)
        return row.index_put_((index,), x).clone()


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.ones(3, 4))

    def forward(self, x):
        y = nn.functional.linear(x, self.state.t())
        self.state.mul_(0.5)
        return y


class Writer(ByOperator):
    """Annotates what index_put_ writes and what it writes there alike."""

    def annotate(self, model):
        for node in model.graph.nodes:
            if node.target == aten.index_put_.default:
                place = node.args[0], node
                inputs = {node.args[0]: INT8, node.args[2]: SharedQuantizationSpec(place)}
                node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
                    inputs, SharedQuantizationSpec(place), _annotated=True
                )
        return model


def test_buffer_when_written_through_an_annotated_view_then_still_written():
    inputs = torch.tensor([1.0, 2.0]), torch.tensor([1, 3])
    gm = converted(ThroughView(), inputs, Writer([]))
    gm(*inputs)
    torch.testing.assert_close(
        gm.state, torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.0] * 4]), rtol=0.02, atol=0.02
    )


def test_buffer_when_a_quantized_view_is_read_and_it_is_written_then_never_folded():
    x = torch.randn(2, 3)
    spec = ByOperator([aten.linear.default], weight=INT8)
    gm = converted(Reads(), (x,), spec)
    first, second = gm(x), gm(x)
    assert not torch.equal(first, second)


class AddsIntoInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)

    def forward(self, x, extra):
        extra += self.conv(x)
        return extra


def test_input_when_an_annotated_operator_writes_it_then_quantized_as_in_torchao_and_noted():
    inputs = torch.randn(1, 2, 3, 3), torch.randn(1, 2, 3, 3)
    gm = converted(AddsIntoInput(), inputs, ByOperator([aten.conv2d.default, aten.add_.Tensor]))
    add = next(n for n in gm.graph.nodes if n.target in (aten.add_.Tensor, aten.add.Tensor))
    assert all("dequantize" in str(source.target) for source in add.all_input_nodes)
    assert any("as torchao does" in note for note in provenance_of(gm).notes)


class Reexports(ByOperator):
    """Exports the graph anew before it annotates, as Arm's and other backends' quantizers do."""

    def transform_for_annotation(self, model):
        return export(model, (torch.randn(2, 4),)).module()


def test_graph_when_the_quantizer_exports_it_anew_then_no_guards_are_left():
    quantizer = Reexports([aten.linear.default])
    gm = converted(nn.Linear(4, 3), (torch.randn(2, 4),), quantizer)
    assert not [node for node in gm.graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize(("shape", "warns"), [((2, 5, 3), True), ((2, 3), False)])
def test_batch_norm_when_it_cannot_go_into_the_linear_then_a_warning(shape, warns):
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)).eval()
    x = torch.randn(shape)
    gm = export(model, (x,)).module()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared = prepare_pt2e(gm, ByOperator([aten.linear.default]))
    assert [str(w.message).startswith("Not fusing linear+bn") for w in caught] == [True] * warns
    torch.testing.assert_close(prepared(x), model(x))


def test_origin_when_prepared_and_converted_then_not_of_what_observes_its_inputs():
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    x = torch.randn(2, 4)
    program = export(model.eval(), (x,))
    quantizer = ByOperator([aten.linear.default], output=INT8)
    prepared = prepare_pt2e(program.module(), quantizer)
    assert origins(prepared)["linear"] == 2  # with the observer of its output
    prepared(x)
    assert origins(convert_pt2e(prepared))["linear"] == 3  # with its quantize and dequantize


def origins(gm):
    """How many nodes come from each node of the exported program."""
    found = Counter()
    for node in gm.graph.nodes:
        sources = node.meta.get("from_node")
        while sources:
            source, sources = sources[-1], sources[-1].from_node
        if node.op in ("call_function", "call_module"):
            found[source.name] += 1
    return found
