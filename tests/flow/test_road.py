"""The whole road from captured program to canonical graph."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.export import export

from pt2e_quant.core.errors import (
    AnnotationError,
    CalibrationError,
    ConfigError,
    InputError,
    Pt2eQuantWarning,
)
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qdq import is_dequantize, is_quantize
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.flow.reexport import export_again


def _quantized(net, quantizer, images, **options):
    prepared = prepare_pt2e(export(net, (images[0],), **options), quantizer())
    calibrate(prepared, images, progress=False)
    return convert_pt2e(prepared)


@pytest.mark.parametrize("as_program", [True, False])
def test_quantize_when_from_program_or_module_then_near_the_float_model(
    net, quantizer, images, batch_dim, as_program
):
    program = export(net, (images[0],), dynamic_shapes=batch_dim)
    prepared = prepare_pt2e(program if as_program else program.module(), quantizer())
    calibrate(prepared, images, progress=False)
    quantized = convert_pt2e(prepared)
    found = quantized(images[1])
    assert set(found) == {"logits", "calls"}
    assert sqnr_db(net(images[1])["logits"], found["logits"]) > 30


def test_prepared_when_called_then_equal_to_the_float_model(net, quantizer, images):
    prepared = prepare_pt2e(export(net, (images[0],)), quantizer())
    torch.testing.assert_close(
        prepared(images[1])["logits"], net(images[1])["logits"], rtol=1e-5, atol=1e-5
    )


def test_users_tensors_when_quantized_then_stay_bit_equal(net, quantizer, images):
    before = {name: value.clone() for name, value in net.state_dict().items()}
    _quantized(net, quantizer, images)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_batch_when_dynamic_then_stays_so_through_convert_and_reexport(
    net, quantizer, images, batch_dim
):
    quantized = _quantized(net, quantizer, images, dynamic_shapes=batch_dim)
    assert quantized(torch.randn(7, 3, 8, 8))["logits"].shape == (7, 10)
    program = export_again(quantized)
    (limits,) = program.range_constraints.values()
    assert limits.upper == 64
    assert program.module()(torch.randn(5, 3, 8, 8))["logits"].shape == (5, 10)


def test_buffer_when_mutated_then_still_mutated_after_convert(net, quantizer, images):
    quantized = _quantized(net, quantizer, images)
    assert capture_of(quantized).mutated_buffers == ("calls",)
    first, second = quantized(images[0])["calls"], quantized(images[0])["calls"]
    assert (float(first), float(second)) == (1.0, 2.0)
    decomposed = export_again(quantized).run_decompositions({})
    assert list(decomposed.graph_signature.buffers_to_mutate.values()) == ["calls"]


def test_calibrate_when_the_model_mutates_buffers_then_they_are_restored(net, quantizer, images):
    prepared = prepare_pt2e(export(net, (images[0],)), quantizer())
    calibrate(prepared, images, progress=False)
    assert float(net.calls) == 0.0


def test_weights_when_converted_then_stored_as_integers_without_float_copy(net, quantizer, images):
    quantized = _quantized(net, quantizer, images)
    state = quantized.state_dict()
    stored = {name for name, value in state.items() if value.dtype == torch.int8}
    assert stored == {"stem.weight_q", "body.weight_q", "head.weight_q"}
    assert not {"stem.weight", "body.weight", "head.weight"} & set(state)
    assert not [name for name in state if name.startswith("bn.")]


def test_reader_when_annotated_then_has_a_dequantize_of_its_own(net, quantizer, images):
    quantized = _quantized(net, quantizer, images)
    for node in quantized.graph.nodes:
        if is_dequantize(node) and any(Q_ANNOTATION_KEY in u.meta for u in node.users):
            assert len(node.users) == 1


def test_metadata_when_converted_then_every_call_keeps_it(net, quantizer, images):
    quantized = _quantized(net, quantizer, images)
    for node in quantized.graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta, node
            assert node.meta.get("nn_module_stack"), node
            assert node.meta.get("stack_trace"), node


def test_provenance_when_converted_then_has_records_and_reasons(net, quantizer, images):
    provenance = provenance_of(_quantized(net, quantizer, images))
    assert {r.name for r in provenance.tensors} >= {"stem.weight", "body.weight", "head.weight"}
    stem = provenance.tensor("stem.weight")
    assert stem.size_before == 8 * 3 * 9 * 4
    assert stem.size_after == 8 * 3 * 9 + 8 * (4 + 8)
    assert "global -> int8" in stem.rule
    reasons = {r.op: r.reason for r in provenance.floats}
    assert reasons["aten.flatten"] == "Toy has no int8 flatten here"


def test_convert_when_there_was_no_data_then_names_the_observers(net, quantizer, images):
    prepared = prepare_pt2e(export(net, (images[0],)), quantizer())
    with pytest.raises(CalibrationError, match="saw no data: activation_post_process_") as error:
        convert_pt2e(prepared)
    assert "calibrate(prepared, batches)" in str(error.value)
    assert "weight" not in str(error.value).splitlines()[0]


def test_calibrate_when_there_is_no_batch_then_refused(net, quantizer, images):
    prepared = prepare_pt2e(export(net, (images[0],)), quantizer())
    with pytest.raises(CalibrationError, match="empty"):
        calibrate(prepared, iter(()), progress=False)


def test_calibrate_when_a_batch_is_wrong_then_refused_before_any_forward(net, quantizer, images):
    prepared = prepare_pt2e(export(net, (images[0],)), quantizer())
    with pytest.raises(InputError, match=r"size 5 in dimension 0.*exactly 4") as error:
        calibrate(prepared, [torch.randn(5, 3, 8, 8)], progress=False)
    assert "dynamic_shapes={'x': {0: torch.export.Dim.AUTO}}" in str(error.value)
    with pytest.raises(CalibrationError):
        convert_pt2e(prepared)


def test_calibrate_when_a_batch_holds_nan_then_names_node_and_batch(net, quantizer, images):
    prepared = prepare_pt2e(export(net, (images[0],)), quantizer())
    bad = images[1].clone()
    bad[0, 0, 0, 0] = float("nan")
    with pytest.raises(CalibrationError, match=r"batch 1: NaN") as error:
        calibrate(prepared, [images[0], bad], progress=False)
    assert "node    x" in str(error.value)


def test_prepare_when_nothing_is_annotated_then_refused_with_reasons(quantizer):
    class Tanh(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x)

    program = export(Tanh(), (torch.randn(2),))
    with pytest.raises(AnnotationError, match="Toy's tanh is slower than float"):
        prepare_pt2e(program, quantizer())
    with pytest.warns(Pt2eQuantWarning, match="no tensor of this graph is to be quantized"):
        prepare_pt2e(program, quantizer(), strict=False)


def test_prepare_when_given_a_symbolic_trace_then_refused(net, quantizer):
    with pytest.raises(InputError, match="no fake values"):
        prepare_pt2e(torch.fx.symbolic_trace(nn.ReLU()), quantizer())


def test_prepare_when_given_a_plain_module_then_refused(net, quantizer):
    with pytest.raises(ConfigError, match="takes a captured program, found ConvNet"):
        prepare_pt2e(net, quantizer())


def test_deepcopy_when_of_prepared_or_converted_then_works_alone(net, quantizer, images):
    prepared = prepare_pt2e(export(net, (images[0],)), quantizer())
    twin = copy.deepcopy(prepared)
    calibrate(prepared, images, progress=False)
    calibrate(twin, [i * 2 for i in images], progress=False)
    first, second = convert_pt2e(prepared), convert_pt2e(twin)
    assert not torch.equal(first(images[0])["logits"], second(images[0])["logits"])
    third = copy.deepcopy(first)
    first.calls.zero_(), third.calls.zero_()
    assert torch.equal(third(images[0])["logits"], first(images[0])["logits"])


def test_convert_when_unfolded_then_keeps_float_weight_and_its_quantize(net, quantizer, images):
    prepared = prepare_pt2e(export(net, (images[0],)), quantizer())
    calibrate(prepared, images, progress=False)
    unfolded = convert_pt2e(prepared, fold_quantize=False)
    folded = _quantized(net, quantizer, images)
    assert "stem.weight" in dict(unfolded.named_parameters())
    assert sum(is_quantize(n) for n in unfolded.graph.nodes) == 3 + sum(
        is_quantize(n) for n in folded.graph.nodes
    )
    torch.testing.assert_close(
        unfolded(images[0])["logits"], folded(images[0])["logits"], rtol=0, atol=0
    )


def test_region_when_it_is_no_grad_then_quantized(quantizer):
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = self.fc(x)
            return y + x

    x = torch.randn(3, 4)
    prepared = prepare_pt2e(export(Region(), (x,)), quantizer())
    quantized = convert_pt2e(calibrate(prepared, [x], progress=False))
    names = {r.name for r in provenance_of(quantized).tensors}
    assert {"fc.weight", "x", "add"} <= names
    assert any(name.startswith("linear") for name in names)


def test_weights_when_tied_then_stored_once(quantizer):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    x = torch.randn(3, 6)
    prepared = prepare_pt2e(export(Tied(), (x,)), quantizer())
    quantized = convert_pt2e(calibrate(prepared, [x], progress=False))
    assert sum(v.dtype == torch.int8 for v in quantized.state_dict().values()) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_model_when_half_precision_then_stays_in_its_type(net, quantizer, images, dtype):
    halves = [image.to(dtype) for image in images]
    model = net.to(dtype)
    prepared = prepare_pt2e(export(model, (halves[0],)), quantizer())
    quantized = convert_pt2e(calibrate(prepared, halves, progress=False))
    found = quantized(halves[1])["logits"]
    assert found.dtype is dtype
    assert sqnr_db(model(halves[1])["logits"], found) > 25


def test_region_when_it_is_autocast_then_quantized(quantizer):
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = self.fc(x)
            return y.float()

    model, x = Region().eval(), torch.randn(4, 8)
    prepared = prepare_pt2e(export(model, (x,)), quantizer())
    quantized = convert_pt2e(calibrate(prepared, [x], progress=False))
    assert "fc.weight" in {r.name for r in provenance_of(quantized).tensors}
    assert sqnr_db(model(x), quantized(x)) > 25


def test_weight_when_made_from_parameters_alone_then_a_constant(quantizer):
    model = nn.utils.parametrizations.weight_norm(nn.Linear(8, 16)).eval()
    x = torch.randn(4, 8)
    prepared = prepare_pt2e(export(model, (x,)), quantizer())
    quantized = convert_pt2e(calibrate(prepared, [x], progress=False))
    assert [v.shape for v in quantized.state_dict().values() if v.dtype is torch.int8] == [(16, 8)]
    assert sqnr_db(model(x), quantized(x)) > 25


def test_export_again_when_the_sample_alone_comes_to_a_size_of_one_then_other_sizes_are_taken(
    quantizer,
):
    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.tensor_split(x, 2, dim=0)[0]
            return self.conv(torch.hstack([rows, rows]).flatten(0, 1).view(-1, 3, 8, 8))

    images = [torch.randn(3, 3, 8, 8)]
    sizes = {"x": {0: torch.export.Dim.AUTO}}
    quantized = _quantized(Pooled().eval(), quantizer, images, dynamic_shapes=sizes)
    program = export_again(quantized)
    for count in (3, 5, 9):
        x = torch.randn(count, 3, 8, 8)
        torch.testing.assert_close(program.module()(x), quantized(x))


def test_export_again_when_every_sample_has_one_of_two_sides_then_all_sizes_are_in_the_graph(
    quantizer,
):
    net = torch.nn.Sequential(torch.nn.Conv2d(2, 10, 2, stride=2), torch.nn.ELU())
    images = [torch.randn(2, 3, 4)]
    sizes = {"input": {1: torch.export.Dim.AUTO}}
    quantized = _quantized(net.eval(), quantizer, images, dynamic_shapes=sizes)
    module = export_again(quantized).module(check_guards=False)
    for rows in (2, 3, 8):
        x = torch.randn(2, rows, 4)
        torch.testing.assert_close(module(x), quantized(x))
