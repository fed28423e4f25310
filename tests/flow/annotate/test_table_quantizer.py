"""The quantizer of an op table: what it annotates, and the reason for everything else."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

import pt2e_quant as pq
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.schemes import Role
from pt2e_quant.core.specs import (
    Q_ANNOTATION_KEY,
    FixedQParamsQuantizationSpec,
    QuantizationAnnotation,
    QuantizationSpec,
    SharedQuantizationSpec,
)
from pt2e_quant.graph.meta import origin_name
from pt2e_quant.observers.static.minmax import PerChannelMinMaxObserver


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        y = torch.relu(self.conv(x))
        y = torch.cat([y, y], dim=2).mean((2, 3))
        return torch.tanh(self.fc(y)) * scale


@pytest.fixture
def gm():
    inputs = (torch.randn(1, 3, 8, 8), torch.randn(1, 2))
    return export(Block().eval(), inputs).module(check_guards=False)


def _node(gm, name):
    return next(n for n in gm.graph.nodes if n.name == name)


def _annotation(gm, name):
    return _node(gm, name).meta.get(Q_ANNOTATION_KEY)


def test_annotate_when_rows_overlap_then_the_widest_wins(gm, quantizer):
    quantizer().annotate(gm)
    assert _annotation(gm, "conv2d").output_qspec is None
    assert isinstance(_annotation(gm, "relu").output_qspec, QuantizationSpec)


def test_annotate_when_a_row_matches_then_specs_carry_the_scheme(gm, quantizer):
    quantizer().annotate(gm)
    inputs = {n.name: s for n, s in _annotation(gm, "conv2d").input_qspec_map.items()}
    assert set(inputs) == {"x", "conv_weight"}
    weight = inputs["conv_weight"]
    assert (weight.dtype, weight.quant_min, weight.quant_max) == (torch.int8, -127, 127)
    assert (weight.qscheme, weight.ch_axis) == (torch.per_channel_symmetric, 0)
    assert weight.observer_or_fake_quant_ctr is PerChannelMinMaxObserver
    assert inputs["x"].qscheme is torch.per_tensor_affine


def test_annotate_when_slots_share_then_they_point_to_the_first(gm, quantizer):
    quantizer().annotate(gm)
    cat, relu = _node(gm, "cat"), _node(gm, "relu")
    assert _annotation(gm, "cat").output_qspec == SharedQuantizationSpec((relu, cat))


def test_annotate_when_nodes_stay_float_then_each_has_its_reason(gm, quantizer):
    quantizer().annotate(gm)
    reasons = {r.op: r.reason for r in provenance_of(gm).floats}
    assert reasons["aten.tanh"] == "Toy's tanh is slower than float"
    assert reasons["aten.mul"] == "Toy has no int8 mul here"
    annotated = sum(Q_ANNOTATION_KEY in n.meta for n in gm.graph.nodes)
    calls = sum(n.op == "call_function" for n in gm.graph.nodes)
    assert annotated + len(provenance_of(gm).floats) == calls


def test_annotate_when_a_module_is_denied_then_float_with_the_rule_as_reason(gm, quantizer):
    quantizer().set_module_name("fc", None).annotate(gm)
    assert _annotation(gm, "linear") is None
    (record,) = [r for r in provenance_of(gm).floats if r.op == "aten.linear"]
    assert record.reason == 'rule: module_name "fc" -> float'
    assert record.size == (4 * 2 + 2) * 4


def test_annotate_when_a_needed_output_is_denied_then_float_with_reason(gm, quantizer):
    quantizer().set_module_name("fc", None, roles=[Role.OUTPUT]).annotate(gm)
    (record,) = [r for r in provenance_of(gm).floats if r.op == "aten.linear"]
    assert "leaves its output" in record.reason


def test_annotate_when_a_weight_is_made_at_run_time_then_float_with_reason(quantizer):
    class Hyper(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            return nn.functional.linear(x, w)

    gm = export(Hyper(), (torch.randn(2, 3), torch.randn(4, 3))).module(check_guards=False)
    quantizer().annotate(gm)
    (record,) = provenance_of(gm).floats
    assert record.reason == 'Toy linear: its weight "w" is computed at run time'


def test_annotate_when_an_input_is_a_written_buffer_then_float_with_reason(quantizer):
    class Last(nn.Module):
        """A linear of what the call before left in a buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(2, 3))
            self.fc = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(self.last) + self.fc(x)
            self.last.copy_(x)
            return y

    gm = export(Last(), (torch.randn(2, 3),)).module(check_guards=False)
    quantizer().annotate(gm)
    assert _annotation(gm, "linear") is None
    assert _annotation(gm, "linear_1") is not None
    reasons = {r.node: r.reason for r in provenance_of(gm).floats}
    assert reasons["linear"].endswith('"last" is a buffer that this graph writes')


@pytest.mark.parametrize(
    ("write", "annotated"),
    [
        (lambda fc, x: (fc(x), x.relu_())[0], True),
        (lambda fc, x: fc(x.relu_()), True),
        (lambda fc, x: (x[:1].relu_(), fc(x))[1], False),
    ],
    ids=["read before", "read as written", "read behind a write of a part"],
)
def test_input_that_a_graph_writes_when_annotated_then_no_write_is_lost(
    write, annotated, quantizer
):
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return write(self.fc, x)

    x = torch.randn(2, 3)
    gm = export(Writes(), (x.clone(),)).module(check_guards=False)
    quantizer().annotate(gm)
    assert (_annotation(gm, "linear") is not None) == annotated
    wrote = next(n for n in gm.graph.nodes if "relu_" in str(n.target))
    edges = _annotation(gm, wrote.name)
    assert edges is None or not edges.input_qspec_map


def test_annotate_when_the_input_has_a_fixed_scale_then_its_reader_takes_it(gm, quantizer):
    """Behind a sigmoid, say: on a scale of its own it would round once more."""
    quantizer().annotate(gm)
    x = _node(gm, "x")
    asked = _annotation(gm, "conv2d").input_qspec_map[x]
    limits = {name: getattr(asked, name) for name in ("dtype", "quant_min", "quant_max")}
    fixed = FixedQParamsQuantizationSpec(scale=1 / 256, zero_point=0, **limits)
    x.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(output_qspec=fixed)
    quantizer().annotate(gm)
    assert _annotation(gm, "conv2d").input_qspec_map[x] is fixed
    narrower = replace(fixed, quant_max=fixed.quant_max - 1)
    x.meta[Q_ANNOTATION_KEY].output_qspec = narrower
    quantizer().annotate(gm)
    assert _annotation(gm, "conv2d").input_qspec_map[x] == asked


def test_annotate_when_operands_are_integers_then_float_with_reason(quantizer):
    class Ints(nn.Module):
        def forward(self, x: Tensor, n: Tensor) -> Tensor:
            return x + n

    gm = export(Ints(), (torch.randn(2), torch.ones(2, dtype=torch.int64))).module()
    quantizer().annotate(gm)
    (record,) = provenance_of(gm).floats
    assert "no floating-point tensor" in record.reason


class Empty(nn.Module):
    """A linear without outputs, and one that also reads an input without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.none = nn.Linear(4, 2), nn.Parameter(torch.zeros(0, 4))

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.relu(self.fc(x)), nn.functional.linear(x, self.none), self.fc(rows)


def test_annotate_when_a_tensor_has_no_elements_then_float_with_reason(quantizer):
    gm = export(Empty(), (torch.randn(3, 4), torch.randn(0, 4))).module()
    quantizer().annotate(gm)
    reasons = {record.node: record.reason for record in provenance_of(gm).floats}
    assert 'weight "none" has no elements' in reasons["linear_1"]
    assert 'input "rows" has no elements' in reasons["linear_2"]


@pytest.mark.parametrize("backend", ["onnx", "cpu", "xnnpack"])
def test_model_when_tensors_have_no_elements_then_the_rest_runs_in_integers(backend):
    torch.manual_seed(0)
    model, target = Empty().eval(), pq.backends.get(backend)
    batches = [(torch.randn(3, 4), torch.randn(0, 4)) for _ in range(4)]
    artifact = pq.quantize(
        model,
        batches[0],
        calibration_data=batches,
        backend=target.allowing_slower() if backend == "cpu" else target,
        progress=False,
    )
    wanted, found = model(*batches[0]), artifact.run(*batches[0])
    assert pq.sqnr_db(wanted[0], found[0]) > 30
    assert [value.shape for value in found[1:]] == [value.shape for value in wanted[1:]]
    assert sum(artifact.report.integer_ops.values()) > 0


def test_annotate_when_a_row_only_moves_data_then_it_follows_its_input(quantizer):
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = nn.functional.max_pool2d(x, 2)
            return nn.functional.max_pool2d(self.conv(x), 2)

    gm = export(Pools().eval(), (torch.randn(1, 3, 16, 16),)).module(check_guards=False)
    quantizer().annotate(gm)
    assert _annotation(gm, "max_pool2d") is None
    assert _annotation(gm, "max_pool2d_1") is not None
    (record,) = provenance_of(gm).floats
    assert record.reason == "it only moves data, and its input is float"


def test_annotate_when_an_add_is_an_attention_mask_then_left_float(quantizer):
    class Masked(nn.Module):
        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            mask = (1.0 - keep) * torch.finfo(torch.float32).min
            return torch.softmax(x @ x.T + mask, -1) @ x

    gm = export(Masked(), (torch.randn(4, 3), torch.ones(4, 4))).module(check_guards=False)
    quantizer().annotate(gm)
    reasons = {r.op: r.reason for r in provenance_of(gm).floats}
    assert "attention mask" in reasons["aten.add"]


def test_annotate_when_done_twice_then_the_same(gm, quantizer):
    quantizer().annotate(gm)
    first = {n.name: repr(n.meta.get(Q_ANNOTATION_KEY)) for n in gm.graph.nodes}
    quantizer().annotate(gm)
    assert first == {n.name: repr(n.meta.get(Q_ANNOTATION_KEY)) for n in gm.graph.nodes}


class InPlace(nn.Module):
    """Additions in place and not: their names move when the first become plain ones."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        y += x
        y = y + self.second(y)
        y += x
        return y


@pytest.mark.parametrize("number", range(3))
def test_set_node_when_named_as_in_the_program_then_that_node_alone_stays_float(number):
    torch.manual_seed(0)
    program = export(InPlace().eval(), (torch.randn(8, 4),))
    names = [node.name for node in program.graph.nodes if node.name.startswith("add")]
    assert names == ["add_", "add", "add__1"]
    quantizer = pq.backends.get("xnnpack").quantizer("int8").set_node(names[number], None)
    prepared = pq.prepare(program, quantizer)
    floats = [record.node for record in provenance_of(prepared).floats]
    assert [origin_name(n) for n in prepared.graph.nodes if n.name in floats] == [names[number]]
