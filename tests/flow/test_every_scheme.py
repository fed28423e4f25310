"""Dynamic, weight-only and group-wise schemes through one flow, on a toy op table."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import AnnotationError, ConfigError
from pt2e_quant.core.qdq import QdqKind, kind_of_qdq
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import Role, Scheme
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import OpRow, OpTable, Slot
from pt2e_quant.graph.pattern import Op, Var
from pt2e_quant.observers.weights.weight_search import WeightSearch

DYNAMIC = [f"a8w{b}{g}" for b in (2, 3, 4, 5, 6, 7, 8) for g in ("", "_g16", "_g32")]
WEIGHT_ONLY = [name[2:] for name in DYNAMIC]


def row_of(scheme: Scheme, name: str = "linear") -> OpRow:
    x = Slot(at="x", role=Role.INPUT, accepts=(scheme.input,) if scheme.input else ())
    w = Slot(at="w", role=Role.WEIGHT, accepts=(scheme.weight,))
    return OpRow(
        name=name, find=(Op(ops.LINEAR, Var("x"), Var("w")),), slots=(x, w), lowers_to="toy"
    )


def quantizer_of(scheme: Scheme, search: WeightSearch = WeightSearch.MIN_MAX) -> TableQuantizer:
    table = OpTable(backend="Toy", rows=(row_of(scheme),))
    return TableQuantizer(table, scheme, observers=ObserverChoice(search=search))


def model_and_input(columns: int = 64) -> tuple[nn.Module, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(columns, 96), nn.GELU(), nn.Linear(96, 32)).eval()
    return model, (torch.randn(3, 5, columns),)


def converted(name: str, *, symmetric: bool = True, search=WeightSearch.MIN_MAX):
    model, inputs = model_and_input()
    scheme = scheme_named(name, symmetric=symmetric)
    prepared = pq.prepare_pt2e(
        torch.export.export(model, inputs, dynamic_shapes=({0: torch.export.Dim("n", max=64)},)),
        quantizer_of(scheme, search),
    )
    return model, pq.convert_pt2e(prepared)


def sqnr(reference, value):
    return 10 * torch.log10(reference.square().sum() / (reference - value).square().sum()).item()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "name", ["int8_dynamic", "int8_dynamic_per_tensor", *DYNAMIC, *WEIGHT_ONLY]
)
def test_scheme_when_converted_without_data_then_canonical_and_near_float(name, symmetric):
    model, quantized = converted(name, symmetric=symmetric)
    other = torch.randn(7, 5, 64)
    bits = 8 if "w" not in name else int(name.split("w")[1][0])
    # 6 dB a bit, less the headroom of ranges over whole rows and tensors, at two layers
    assert sqnr(model(other), quantized(other)) > 6 * bits - 12
    kinds = [kind_of_qdq(n) for n in quantized.graph.nodes if kind_of_qdq(n)]
    weights = QdqKind.PER_CHANNEL_GROUP if "_g" in name else QdqKind.PER_CHANNEL
    assert kinds.count(weights) == 2
    if name.startswith("w"):
        assert len(kinds) == 2


@pytest.mark.parametrize("name", ["a4w4", "w4a4", "a4w4_g32"])
def test_four_bit_activations_when_calibrated_then_of_sixteen_integers(name):
    model, inputs = model_and_input()
    program = torch.export.export(model, inputs)
    prepared = pq.prepare_pt2e(program, quantizer_of(scheme_named(name)))
    quantized = pq.convert_pt2e(pq.calibrate(prepared, [inputs], progress=False))
    static = [n for n in quantized.graph.nodes if kind_of_qdq(n) is QdqKind.PER_TENSOR]
    assert static
    assert all(n.args[3:5] == (-8, 7) for n in static)
    assert sqnr(model(*inputs), quantized(*inputs)) > 8


@pytest.mark.parametrize("search", [WeightSearch.MSE, WeightSearch.HQQ])
@pytest.mark.parametrize("name", ["w4", "w4_g32", "a8w4_g32", "w3_g16"])
def test_searched_weights_when_converted_then_read_back_as_searched(name, search):
    model, quantized = converted(name, search=search)
    record = pq.provenance_of(quantized).tensor("0.weight")
    assert record.observer.startswith("WeightObserver")
    other = torch.randn(7, 5, 64)
    assert sqnr(model(other), quantized(other)) > 10


def test_records_when_dynamic_and_grouped_then_say_so():
    _, quantized = converted("a8w4_g32")
    provenance = pq.provenance_of(quantized)
    assert provenance.tensor("0.weight").group_size == 32
    assert provenance.tensor("0.weight").scale == []
    assert provenance.tensor("input_1").is_dynamic


def test_groups_when_they_divide_no_weight_then_refused_with_node_and_fix():
    program = torch.export.export(torch.nn.Sequential(torch.nn.Linear(40, 8)), (torch.ones(2, 40),))
    with pytest.raises(AnnotationError, match="groups of 32 do not divide the 40 columns") as error:
        pq.prepare_pt2e(program, quantizer_of(scheme_named("w4_g32")))
    assert "linear" in str(error.value)
    assert 'of whole rows ("w4", "a8w4", …), or quantizer.pad_groups()' in str(error.value.fix)


def test_groups_when_they_divide_one_of_two_weights_then_the_other_is_float_with_the_fix():
    model = torch.nn.Sequential(torch.nn.Linear(64, 40), torch.nn.Linear(40, 8)).eval()
    program = torch.export.export(model, (torch.randn(2, 64),))
    quantized = pq.convert_pt2e(pq.prepare_pt2e(program, quantizer_of(scheme_named("w4_g32"))))
    provenance = pq.provenance_of(quantized)
    assert provenance.tensor("0.weight").group_size == 32
    (left,) = [r for r in provenance.floats if r.node == "linear_1"]
    assert "groups of 32 do not divide the 40 columns" in left.reason
    assert "quantizer.pad_groups()" in left.fix


def test_groups_when_smaller_ones_divide_then_those_are_offered():
    program = torch.export.export(torch.nn.Sequential(torch.nn.Linear(96, 8)), (torch.ones(2, 96),))
    with pytest.raises(AnnotationError, match="groups of 128 do not divide the 96") as error:
        pq.prepare_pt2e(program, quantizer_of(scheme_named("w4_g128")))
    assert 'of groups of 32 ("…_g32")' in str(error.value.fix)


def test_groups_when_padded_by_choice_then_converted_and_near_float():
    model, inputs = model_and_input(columns=40)
    quantizer = quantizer_of(scheme_named("w8_g32")).pad_groups()
    prepared = pq.prepare_pt2e(torch.export.export(model, inputs), quantizer)
    assert sqnr(model(*inputs), prepared(*inputs)) > 100
    quantized = pq.convert_pt2e(prepared)
    assert sqnr(model(*inputs), quantized(*inputs)) > 40
    shapes = [tuple(b.shape) for name, b in quantized.named_buffers() if name.endswith("_q")]
    assert (96, 64) in shapes


def test_rows_of_one_pattern_when_no_scheme_fits_both_then_one_table():
    names = ["w4_g32", "a8w4_g32", "int8_dynamic_per_tensor"]
    schemes = [scheme_named(name) for name in names]
    rows = tuple(row_of(s, f"linear_{s.name}") for s in schemes)
    table = OpTable(backend="Toy", rows=rows)
    model, inputs = model_and_input()
    quantizer = TableQuantizer(table, schemes[0])
    quantizer.set_module_name("2", schemes[1])
    quantized = pq.convert_pt2e(pq.prepare_pt2e(torch.export.export(model, inputs), quantizer))
    tokens = [n for n in quantized.graph.nodes if kind_of_qdq(n) is QdqKind.PER_TOKEN]
    assert len(tokens) == 2
    with pytest.raises(ConfigError, match="rows of equal width"):
        OpTable(backend="Toy", rows=(*rows, replace(rows[0], name="again")))


def test_rows_for_other_schemes_when_none_suits_then_the_reason_is_theirs():
    schemes = [scheme_named(name) for name in ("w4_g32", "a8w4_g32")]
    rows = tuple(row_of(s, f"linear_{s.name}") for s in schemes)
    model, inputs = model_and_input()
    quantizer = TableQuantizer(OpTable(backend="Toy", rows=rows), scheme_named("w3_g32"))
    with pytest.raises(AnnotationError, match=r'its weight "w" takes int4.*, not int3') as error:
        pq.prepare_pt2e(torch.export.export(model, inputs), quantizer)
    assert error.value.node_name == "linear"  # the one with most weights stands for all
    assert "module  0" in str(error.value)


def test_float_slot_when_the_scheme_quantizes_it_then_refused():
    slot = Slot(at="x", role=Role.INPUT, accepts=())
    with pytest.raises(ValueError, match='"x" takes float alone, not int8'):
        slot.resolve(scheme_named("int8_dynamic"))
