import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pt2e_quant as pq
from pt2e_quant.core.errors import CalibrationError, ConfigError, InputError
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.flow.annotate.rules import QuantRule, RuleKind
from pt2e_quant.tensors import QuantizedTensor
from pt2e_quant.tensors.graphs.graph import quantized_weights
from pt2e_quant.tensors.quantize import pack_, quantize_
from tests.needs_vnni import NEEDS_VNNI


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, 64)
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.head = nn.Linear(64, 32, bias=False)

    def forward(self, places):
        x = self.table(places)
        x = x + F.elu(self.first(x))
        y = torch.log(self.second(x).abs() + 1)
        return self.head(torch.cat([x, y], -1)[..., 32:96].sigmoid())


PLACES = torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(3))
DATA = [
    (torch.randint(0, 32, (2, 7), generator=torch.Generator().manual_seed(n)),) for n in range(6)
]


@pytest.mark.parametrize(
    ("name", "least_db"), [("w8", 40), ("int8_dynamic", 40), ("w4_g32", 20), ("fp8_dynamic", 25)]
)
def test_module_when_quantized_in_place_then_is_near_and_smaller(name, least_db):
    model = Net().eval()
    expected = model(PLACES)
    report = quantize_(model, name)
    assert [row.name for row in report.rows] == ["first.weight", "second.weight", "head.weight"]
    assert pq.sqnr_db([expected], [model(PLACES)]) > least_db
    assert type(model.table.weight) is nn.Parameter
    assert all(row.bytes_after < 0.35 * row.bytes_before for row in report.rows)


def test_module_when_a_filter_says_so_then_embeddings_are_quantized():
    model = Net().eval()
    expected = model(PLACES)
    quantize_(model, "w8", lambda module, path: path == "table")
    assert isinstance(model.table.weight, QuantizedTensor)
    assert type(model.first.weight) is nn.Parameter
    assert pq.sqnr_db([expected], [model(PLACES)]) > 35


def test_module_when_rules_are_given_then_the_more_specific_wins():
    model = Net()
    rules = [
        QuantRule(kind=RuleKind.MODULE_TYPE, pattern="Linear", scheme=scheme_named("w4_g32")),
        QuantRule(kind=RuleKind.MODULE_NAME, pattern="first", scheme=None),
        QuantRule(kind=RuleKind.MODULE_NAME, pattern="head", scheme=scheme_named("w8")),
    ]
    report = quantize_(model, None, rules=rules)
    assert {row.name: row.scheme.split("[")[0] for row in report.rows} == {
        "second.weight": "int4",
        "head.weight": "int8",
    }


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (QuantRule(kind=RuleKind.MODULE_NAME, pattern="frist", scheme=None), "first"),
        (QuantRule(kind=RuleKind.OPERATOR, pattern="linear", scheme=None), "speaks of operators"),
    ],
)
def test_module_when_a_rule_fits_nothing_then_refused(rule, text):
    with pytest.raises(ConfigError, match=text):
        quantize_(Net(), "w8", rules=[rule])


def test_module_when_a_group_does_not_divide_then_named_or_left_float():
    model = nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 4))
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError, match=r'"1.weight" cannot be quantized'):
        quantize_(model, "w4_g32")
    assert all(value is before[name] for name, value in model.named_parameters())
    with pytest.warns(pq.errors.Pt2eQuantWarning, match=r'"1.weight" cannot be quantized'):
        report = quantize_(model, "w4_g32", strict=False)
    assert [row.name for row in report.floats] == ["1.weight"]
    assert "groups of 32" in str(report)


def test_module_when_a_weight_does_not_go_into_a_layout_then_named_and_left_as_it_was():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].weight[:, 2:] = 0  # the second is dense
        model[0].weight[:, 4:6] = 1
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError, match=r'"1.weight": four neighbours hold more than two'):
        quantize_(model, "w8", layout="sparse_2_4")
    assert all(value is before[name] for name, value in model.named_parameters())


def test_module_when_quantized_twice_then_refused():
    model = nn.Sequential(nn.Linear(64, 8))
    quantize_(model, "w8")
    with pytest.raises(ConfigError, match="already"):
        quantize_(model, "w8")


def test_module_when_activations_are_static_then_scales_are_of_the_data():
    model = Net().eval()
    expected = model(PLACES)
    with pytest.raises(CalibrationError, match="need calibration data"):
        quantize_(copy.deepcopy(model), "int8")
    quantize_(model, "int8", calibration_data=DATA)
    assert model.first.weight.input_scale.shape == (1,)
    assert pq.sqnr_db([expected], [model(PLACES)]) > 30
    again = copy.deepcopy(model)
    assert torch.equal(again(PLACES), model(PLACES))


def test_module_when_functions_are_calibrated_then_results_are_quantized():
    model = Net().eval()
    expected = model(PLACES)
    plain = copy.deepcopy(model)
    quantize_(plain, "int8", calibration_data=DATA)
    quantize_(model, "int8", calibration_data=DATA, functions=True)
    found = model(PLACES)
    assert not torch.equal(found, plain(PLACES))
    assert pq.sqnr_db([expected], [found]) > 25


def test_module_when_an_algorithm_is_asked_for_then_codes_are_its():
    model = Net().eval()
    nearest = copy.deepcopy(model)
    quantize_(nearest, "w4_g32")
    report = quantize_(model, "w4_g32", algorithms=["gptq"], calibration_data=DATA)
    assert len(report.quantized) == 3
    assert not torch.equal(model.second.weight.dequantize(), nearest.second.weight.dequantize())
    assert pq.sqnr_db([Net().eval()(PLACES)], [model(PLACES)]) > 15


def test_module_when_an_algorithm_has_labeled_batches_then_inputs_picks_its_data():
    labeled, plain = Net().eval(), Net().eval()
    batches = [(places, torch.zeros(2)) for (places,) in DATA]
    quantize_(labeled, "w4_g32", algorithms=["gptq"], calibration_data=batches, inputs=0)
    quantize_(plain, "w4_g32", algorithms=["gptq"], calibration_data=DATA)
    assert torch.equal(labeled(PLACES), plain(PLACES))


def test_module_when_on_the_meta_device_then_loads_a_quantized_state_dict():
    source = Net().eval()
    quantize_(source, "w4_g32", layout="packed")
    with torch.device("meta"):
        empty = Net().eval()
    quantize_(empty, "w4_g32", layout="packed")
    empty.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(empty(PLACES), source(PLACES))


def test_module_when_weights_are_tied_then_stay_one_tensor():
    model = Net().eval()
    model.head.weight = model.table.weight = nn.Parameter(torch.randn(32, 64))
    quantize_(model, "w8")
    assert model.head.weight is model.table.weight
    assert model.head.weight.form.layout == "plain"  # rows are gathered from it


@NEEDS_VNNI
def test_module_when_packed_anew_then_codes_and_ties_stay():
    model = Net().eval()
    model.head.weight = model.table.weight = nn.Parameter(torch.randn(32, 64))
    quantize_(model, "w8", layout="plain")
    before = {name: tensor.dequantize() for name, tensor in quantized_weights(model).items()}
    pack_(model)
    after = quantized_weights(model)
    assert model.head.weight is model.table.weight
    assert [after[n].form.layout for n in ("first.weight", "head.weight")] == ["onednn", "plain"]
    assert all(torch.equal(after[name].dequantize(), real) for name, real in before.items())


def test_module_when_nothing_is_chosen_then_refused():
    with pytest.raises(ConfigError, match="no module of this Embedding"):
        quantize_(nn.Embedding(3, 4), "w8")


def test_quantize_when_batches_have_labels_then_the_error_names_the_argument():
    model = nn.Sequential(nn.Linear(8, 4)).eval()
    batch = (torch.randn(2, 8), torch.zeros(2))
    with pytest.raises(InputError, match=r"(?s)does not take the batch.*inputs=0"):
        pq.quantize_(model, "int8", calibration_data=[batch])
    assert type(model[0].weight) is nn.Parameter
    pq.quantize_(model, "int8", calibration_data=[batch], inputs=0)


class Attends(nn.Module):
    """Attention that reads the weight of its output projection without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.out = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.attention(x, x, x, need_weights=False)[0])
        return found


def test_static_inputs_when_no_call_reaches_a_linear_then_it_stays_float_unless_strict():
    torch.manual_seed(0)
    module, x = Attends().eval(), torch.randn(2, 10, 64)
    with pytest.raises(CalibrationError, match=r'with a row reached "attention\.out_proj"'):
        quantize_(module, "int8", calibration_data=[x])
    assert not isinstance(module.out.weight, QuantizedTensor)
    expected = module(x)
    with pytest.warns(pq.errors.Pt2eQuantWarning, match=r"attention\.out_proj"):
        report = quantize_(module, "int8", calibration_data=[x], strict=False)
    reasons = {row.name: row.reason for row in report.rows}
    assert "no batch with a row reached" in reasons["attention.out_proj.weight"]
    assert not reasons["out.weight"]
    assert pq.sqnr_db([expected], [module(x)]) > 25


class Shared(nn.Module):
    """Calls one linear by two names, and reads another's weight without a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = self.first
        self.read = nn.Linear(64, 64)
        self.frozen = nn.BatchNorm1d(64).eval()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.relu(self.first(self.frozen(x)))) * self.read.weight.mean(0)
        return y


def test_algorithms_when_modules_are_shared_or_read_by_hand_then_each_is_told():
    torch.manual_seed(0)
    module, x = Shared(), torch.randn(32, 64)
    expected = module(x)
    given = {"algorithms": ["gptq"], "calibration_data": [x]}
    before = module.first.weight
    with pytest.raises(ConfigError, match=r'"read\.weight" cannot .* of the exported module reads'):
        quantize_(module, "w4_g32", **given)
    assert module.first.weight is before
    with pytest.warns(pq.errors.Pt2eQuantWarning, match=r'"read\.weight" cannot'):
        report = quantize_(module, "w4_g32", strict=False, **given)
    assert {row.name: bool(row.reason) for row in report.rows} == {
        "first.weight": False,
        "read.weight": True,
    }
    assert isinstance(module.first.weight, QuantizedTensor)
    assert module.first.weight is module.second.weight
    assert module.training
    assert not module.frozen.training
    assert pq.sqnr_db([expected], [module(x)]) > 12


@pytest.mark.parametrize(("scheme", "algorithms"), [("int8", ()), ("w8", ("gptq",))])
def test_calibration_when_a_batch_has_no_rows_then_it_counts_for_nothing(scheme, algorithms):
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()] * 2
    models = [copy.deepcopy(model) for model in models]
    x, empty = torch.randn(6, 64), torch.empty(0, 64)
    for model, batches in zip(models, ([x], [empty, x, empty]), strict=True):
        quantize_(model, scheme, algorithms=algorithms, calibration_data=batches)
    assert torch.equal(models[0](x), models[1](x))
    assert models[0](empty).shape == (0, 8)


@pytest.mark.parametrize(("scheme", "algorithms"), [("int8", ()), ("w8", ("gptq",))])
def test_calibration_when_no_batch_has_rows_then_refused(scheme, algorithms):
    model = nn.Sequential(nn.Linear(64, 32))
    with pytest.raises(CalibrationError, match="row"):
        quantize_(model, scheme, algorithms=algorithms, calibration_data=[torch.empty(0, 64)])
    with pytest.raises(CalibrationError, match="row"):
        pq.tensors.prune_2_4_(model, [torch.empty(0, 64)])


LAZY = {
    "quantize_": lambda model: quantize_(model, "w8"),
    "prune": pq.tensors.prune_2_4_,
    "float8": pq.training.convert_to_float8_training,
    "int8": pq.training.convert_to_int8_training,
    "stored": lambda model: pq.training.quantize_parameters(model, "w8"),
    "qat": lambda model: pq.training.prepare_qat_(model, "int8"),
    "master": lambda model: pq.training.with_master_weights(torch.optim.SGD, model, lr=1.0),
}


@pytest.mark.parametrize("change", LAZY.values(), ids=LAZY)
def test_module_when_lazy_then_the_parameter_is_named(change):
    model = nn.Sequential(nn.Linear(64, 32), nn.LazyLinear(8))
    with pytest.raises(ConfigError, match=r'(?s)"1\.weight" has no shape yet.*call the model once'):
        change(model)
