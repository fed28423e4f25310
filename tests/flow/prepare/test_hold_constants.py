import copy
import pickle

import pytest
import torch
from torch import nn
from torch.export import export
from toy_formats import model_and_input, quantizer_of

import pt2e_quant as pq
from pt2e_quant.core.canonical import Form, verify_canonical
from pt2e_quant.core.errors import CalibrationError, ConfigError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.core.schemes import BIAS_INT32, INT8_ACTIVATION, INT8_WEIGHT, Role, Scheme
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice
from pt2e_quant.flow.annotate.table_quantizer import TableQuantizer
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_captured, prepare_pt2e
from pt2e_quant.flow.prepare.prepared import observers_of, prepared_state
from pt2e_quant.graph.op_table import OpRow, OpTable, Slot
from pt2e_quant.graph.pattern import Op, Var
from pt2e_quant.graph.show import show
from pt2e_quant.observers.static.minmax import PerChannelMinMaxObserver
from pt2e_quant.observers.weights.weight import WeightObserver
from pt2e_quant.observers.weights.weight_search import WeightSearch
from pt2e_quant.passes.algorithms.gptq import Gptq
from pt2e_quant.pt2e import quantize_pt2e as drop_in


class Tied(nn.Module):
    """Two linears of one weight, a third that reads a transposed constant."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.third = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        y = self.second(torch.relu(self.first(x)))
        return nn.functional.linear(y, self.third.t())


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(1))


class Counting(PerChannelMinMaxObserver):
    """A user's observer: counts what it is shown, over all that are made of it."""

    made = 0
    shown = 0

    def __init__(self, **options):
        super().__init__(**options)
        Counting.made += 1

    def forward(self, x):
        Counting.shown += 1
        return super().forward(x)


def prepared_of(model, quantizer, *, observe_constants=False):
    gm = export(model.eval(), (X,)).module()
    return prepare_captured(gm, quantizer, strict=True, observe_constants=observe_constants)


def observed_constants(gm):
    return [
        n for n, _ in observers_of(gm) if prepared_state(gm).observer_infos[n.target].is_constant
    ]


def test_prepare_when_weights_need_no_reader_then_no_node_observes_them(quantizer):
    gm = prepared_of(Tied(), quantizer())
    assert not observed_constants(gm)
    assert [c.node for c in prepared_state(gm).constants] == ["second_weight", "third"]
    assert prepared_state(gm).constants[0].readers == ("linear", "linear_1")
    assert len({id(c.observer) for c in prepared_state(gm).constants}) == 1


def with_callback(quantizer):
    quantizer.prepare_obs_or_fq_callback = lambda model, places: None
    return quantizer


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda make: make(algorithms=[Gptq()]), id="an algorithm"),
        pytest.param(lambda make: with_callback(make()), id="a callback"),
    ],
)
def test_prepare_when_something_may_read_them_then_weights_are_observed(change, quantizer):
    gm = prepared_of(Tied(), change(quantizer))
    assert len(observed_constants(gm)) == 2
    assert not prepared_state(gm).constants


def test_weights_when_prepared_by_the_drop_in_face_then_observed(quantizer):
    gm = drop_in.prepare_pt2e(export(Tied().eval(), (X,)), quantizer())
    assert len(observed_constants(gm)) == 2


@pytest.mark.parametrize("fold_quantize", [True, False])
@pytest.mark.parametrize(
    "observers",
    [
        ObserverChoice(),
        ObserverChoice(search=WeightSearch.MSE),
        ObserverChoice(weight_per_channel=Counting),
    ],
)
def test_convert_when_weights_are_held_then_equal_to_observed_weights(
    observers, fold_quantize, quantizer
):
    converted = []
    for observe in (False, True):
        gm = prepared_of(Tied(), quantizer(observers=observers), observe_constants=observe)
        gm(X)
        converted.append(convert_pt2e(gm, fold_quantize=fold_quantize))
    held, observed = converted
    assert sorted(show(held).splitlines()) == sorted(show(observed).splitlines())
    assert torch.equal(held(X), observed(X))
    assert held.state_dict().keys() == observed.state_dict().keys()
    for name, value in observed.state_dict().items():
        assert torch.equal(held.state_dict()[name], value)
    verify_canonical(held, form=Form.CANONICAL if fold_quantize else Form.UNFOLDED)
    records = [
        sorted((r.name, r.role, tuple(r.uses), r.size_before, r.size_after) for r in table.tensors)
        for table in map(provenance_of, converted)
    ]
    assert records[0] == records[1]
    assert provenance_of(held).sizes == provenance_of(observed).sizes


def test_observer_when_the_users_own_then_shown_each_weight_once(quantizer):
    Counting.made = Counting.shown = 0
    choice = ObserverChoice(weight_per_channel=Counting)
    gm = prepared_of(Tied(), quantizer(observers=choice))
    gm(X)
    gm(X)
    assert Counting.shown == 0
    convert_pt2e(gm)
    assert (Counting.made, Counting.shown) == (1, 2)


def test_weights_when_tied_then_stored_once(quantizer):
    gm = prepared_of(Tied(), quantizer())
    gm(X)
    names = [n for n, _ in convert_pt2e(gm).named_buffers() if n.endswith("_q")]
    assert names == ["third_q", "second.weight_q"]


def test_prepared_when_copied_or_pickled_then_each_converts_apart(quantizer):
    gm = prepared_of(Tied(), quantizer())
    gm(X)
    twin, loaded = copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))
    with torch.no_grad():
        twin.get_parameter("second.weight").mul_(2)
    expected = convert_pt2e(gm)
    doubled = convert_pt2e(twin)
    assert torch.equal(convert_pt2e(loaded)(X), expected(X))
    assert torch.equal(
        doubled.get_buffer("second.weight_scale"), 2 * expected.get_buffer("second.weight_scale")
    )
    assert torch.equal(doubled.get_buffer("third_q"), expected.get_buffer("third_q"))


def test_held_weights_when_saved_and_loaded_then_kept(quantizer, tmp_path):
    gm = prepared_of(Tied(), quantizer())
    gm(X)
    pq.save(gm, tmp_path / "p.ptq")
    loaded = pq.load(tmp_path / "p.ptq")
    assert len(prepared_state(loaded).constants) == 2
    assert torch.equal(convert_pt2e(loaded)(X), convert_pt2e(gm)(X))


@pytest.mark.parametrize("name", ["w8", "w4_g32", "nf4", "int8_dynamic"])
def test_scheme_when_without_data_then_no_weight_observer_and_no_call(name):
    model, x = model_and_input()
    gm = prepare_pt2e(export(model, x), quantizer_of(scheme_named(name)))
    assert not observed_constants(gm)
    assert prepared_state(gm).constants
    result = convert_pt2e(gm)
    weights = [r for r in provenance_of(result).tensors if r.role == "weight"]
    assert len(weights) == 2
    assert all(0 < r.size_after < r.size_before for r in weights)
    assert result(*x).shape == (3, 5, 64)


def test_convert_when_a_weight_holds_nan_then_it_is_named(quantizer):
    model = Tied()
    gm = prepared_of(model, quantizer())
    gm(X)
    with torch.no_grad():
        gm.get_parameter("third")[0, 0] = float("nan")
    with pytest.raises(CalibrationError, match="NaN") as caught:
        convert_pt2e(gm)
    assert caught.value.node_name == "third"


def test_convert_when_a_reader_was_renamed_then_refused_with_its_name(quantizer):
    gm = prepared_of(Tied(), quantizer())
    gm(X)
    reader = next(n for n in gm.graph.nodes if n.name == "linear")
    reader.name = "renamed"
    with pytest.raises(ConfigError, match=r'"second.weight" is to be quantized for linear'):
        convert_pt2e(gm)


def test_weight_when_a_bias_derives_from_it_then_observed(quantizer):
    linear = Op(torch.ops.aten.linear.default, Var("x"), Var("w"), Var("b"), name="linear")
    slots = (
        Slot(at="x", role=Role.INPUT, accepts=(INT8_ACTIVATION,)),
        Slot(at="w", role=Role.WEIGHT, accepts=(INT8_WEIGHT,)),
        Slot(at="b", role=Role.BIAS, accepts=(BIAS_INT32,), derived_from=("x", "w")),
    )
    row = OpRow(name="linear", find=(linear,), slots=slots, lowers_to="linear")
    scheme = Scheme(
        name="s", input=INT8_ACTIVATION, output=None, weight=INT8_WEIGHT, bias=BIAS_INT32
    )
    gm = prepared_of(nn.Linear(6, 6), TableQuantizer(OpTable(backend="T", rows=(row,)), scheme))
    assert len(observed_constants(gm)) == 2
    assert not prepared_state(gm).constants


def test_weight_observer_when_it_sees_two_weights_then_each_keeps_its_qparams(quantizer):
    choice = ObserverChoice(weight_per_channel=WeightObserver)
    gm = prepared_of(Tied(), quantizer(observers=choice))
    gm(X)
    converted = convert_pt2e(gm)
    first, third = (converted.get_buffer(f"{n}_scale") for n in ("second.weight", "third"))
    assert first.shape == (6,)
    assert third.shape == (4,)
