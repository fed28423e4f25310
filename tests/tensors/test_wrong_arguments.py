"""What callers hand in wrong: each error names the argument, what was found, and the fix."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant import training
from pt2e_quant.core.errors import (
    ArtifactError,
    CalibrationError,
    ConfigError,
    InputError,
    Pt2eQuantError,
)
from pt2e_quant.core.operators import choose_qparams_affine, dequantize_affine, quantize_affine
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.tensors import QuantizedTensor, register_kernel, register_layout, unregister_kernel
from pt2e_quant.tensors.kernels.dispatch import KERNELS
from pt2e_quant.tensors.layouts.table import LAYOUTS

SGD = torch.optim.SGD
W8 = scheme_named("w8").weight
X = torch.ones(4, 64)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))


def with_weight(values: Tensor) -> nn.Linear:
    linear = nn.Linear(64, 8)
    linear.weight = nn.Parameter(values, requires_grad=values.is_floating_point())
    return linear


def quantized() -> QuantizedTensor:
    assert W8 is not None
    return QuantizedTensor.from_float(torch.ones(8, 64), W8)


MODULE_CALLS: dict[str, Callable[[Any], Any]] = {
    "quantize_": lambda m: pq.quantize_(m, "w8"),
    "auto_quantize": lambda m: pq.auto_quantize(m, X),
    "pack_": pq.tensors.pack_,
    "to_graph": lambda m: pq.tensors.to_graph(m, (X,)),
    "load_graph": lambda m: pq.tensors.load_graph(m, None),
    "save_module": lambda m: pq.tensors.save_module(m, "unused"),
    "load_module": lambda m: pq.tensors.load_module(m, "unused"),
    "prune_2_4_": pq.tensors.prune_2_4_,
    "quantize_parameters": lambda m: training.quantize_parameters(m, "w8"),
    "convert_to_float8_training": training.convert_to_float8_training,
    "convert_to_int8_training": training.convert_to_int8_training,
    "update_float8_scales": training.update_float8_scales,
    "prepare_qat_": lambda m: training.prepare_qat_(m, "w8"),
    "convert_qat_": training.convert_qat_,
}
FILTER_CALLS: dict[str, Callable[[Any], Any]] = {
    "quantize_": lambda f: pq.quantize_(model(), "w8", f),
    "auto_quantize": lambda f: pq.auto_quantize(model(), X, filter=f),
    "prune_2_4_": lambda f: pq.tensors.prune_2_4_(model(), filter=f),
    "quantize_parameters": lambda f: training.quantize_parameters(model(), "w8", filter=f),
    "convert_to_float8": lambda f: training.convert_to_float8_training(model(), filter=f),
    "convert_to_int8": lambda f: training.convert_to_int8_training(model(), filter=f),
    "prepare_qat_": lambda f: training.prepare_qat_(model(), "w8", f),
}
BATCH_CALLS: dict[str, Callable[[Any], Any]] = {
    "quantize_": lambda d: pq.quantize_(model(), "int8", calibration_data=d),
    "prune_2_4_": lambda d: pq.tensors.prune_2_4_(model(), d),
}


@pytest.mark.parametrize("name", MODULE_CALLS)
@pytest.mark.parametrize("given", [None, 3, "model", X, nn.Linear, [nn.ReLU()]])
def test_module_when_it_is_none_then_the_error_names_it(name: str, given: object):
    with pytest.raises(ConfigError, match=r"(module|model) is a torch.nn.Module, found") as caught:
        MODULE_CALLS[name](given)
    assert caught.value.fix


@pytest.mark.parametrize("name", FILTER_CALLS)
@pytest.mark.parametrize("given", [3, "linear", ["0"], nn.Linear, lambda module: True])
def test_filter_when_it_is_no_function_of_two_then_says_so(name: str, given: object):
    with pytest.raises(ConfigError, match=r"filter (is|takes).*module and its path") as caught:
        FILTER_CALLS[name](given)
    assert "filter=lambda module, path" in str(caught.value.fix)


@pytest.mark.parametrize("name", BATCH_CALLS)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "batches must be an iterable of batches, found one int"),
        ("x", "found one str"),
        (X, "found one Tensor"),
        ([None], '"0" is given no tensor first, but NoneType'),
        ([1, 2], '"0" is given no tensor first, but int'),
        ([torch.ones(4, 3)], 'fails on calibration batch 0 in "0": RuntimeError: mat1 and mat2'),
        ([X, X.double()], 'fails on calibration batch 1 in "0": RuntimeError'),
        ([{"other": X}], "does not take the batch"),
    ],
)
def test_batches_when_the_module_cannot_take_them_then_says_which(
    name: str, given: object, said: str
):
    with pytest.raises(InputError) as caught:
        BATCH_CALLS[name](given)
    assert said in str(caught.value)
    assert caught.value.fix


def test_prune_when_calibration_data_is_not_finite_then_ends_with_an_error():
    with pytest.raises(CalibrationError, match="NaN or infinite"):
        pq.tensors.prune_2_4_(model(), [torch.full((4, 64), float("nan"))])


@pytest.mark.parametrize("scheme", ["w8", "w4_g32", "fp8_weight_only", "mxfp4_weight_only", "nf4"])
@pytest.mark.parametrize(
    ("values", "said"),
    [
        (torch.zeros(0, 64), "nothing to quantize in a tensor of shape (0, 64)"),
        (torch.zeros(8, 0), "nothing to quantize in a tensor of shape (8, 0)"),
        (torch.ones(8, 64).to(torch.float8_e4m3fn), "found torch.float8_e4m3fn"),
        (torch.ones(8, 64, dtype=torch.cfloat), "complex64"),
        (torch.ones(8, 64, dtype=torch.int64), "int64"),
        (torch.full((8, 64), float("nan")), "NaN"),
        (torch.full((8, 64), float("inf")), "infinity"),
    ],
)
def test_weight_when_it_cannot_be_quantized_then_names_it_and_changes_nothing(
    scheme: str, values: Tensor, said: str
):
    for call in (pq.quantize_, training.quantize_parameters):
        module = nn.Sequential(with_weight(values))
        before = module[0].weight
        with pytest.raises(ConfigError) as caught:
            call(module, scheme)
        assert said in str(caught.value)
        assert '"0' in str(caught.value)
        assert caught.value.fix
        assert module[0].weight is before


@pytest.mark.parametrize("scheme", ["w8", "w4_g32", "int8_dynamic", "fp8_weight_only", "nf4"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["plain", "transposed", "expanded"])
def test_weight_of_any_real_dtype_and_strides_when_quantized_then_runs(
    scheme: str, dtype: torch.dtype, how: str
):
    torch.manual_seed(0)
    values = {
        "plain": torch.randn(8, 64),
        "transposed": torch.randn(64, 8).t(),
        "expanded": torch.randn(1, 64).expand(8, 64),
    }[how].to(dtype)
    linear = with_weight(values)
    linear.bias = None
    x = torch.randn(4, 64).to(dtype)
    expected = linear(x)
    pq.quantize_(linear, scheme)
    found = linear(x)
    assert found.dtype == dtype
    assert pq.sqnr_db([expected.float()], [found.float()]) > 15


def masters(values: Any) -> Any:
    return training.with_master_weights(SGD, model(), values=values)


Case = tuple[str, Callable[[], Any], str]
OPTIONS: list[Case] = [
    ("scheme", lambda: pq.quantize_(model(), None), "takes a scheme|no module"),
    ("scheme", lambda: pq.quantize_(model(), 3), "takes a scheme"),
    ("rules", lambda: pq.quantize_(model(), "w8", rules=3), "rules is a list of rules"),
    ("rules", lambda: pq.quantize_(model(), "w8", rules=["0"]), r"rules\[0\] is a rule"),
    ("layout", lambda: pq.quantize_(model(), "w8", layout="pakced"), 'no layout "pakced"'),
    ("layout", lambda: pq.quantize_(model(), "w8", layout=None), 'no layout "None"'),
    ("layout", lambda: pq.quantize_(model(), "w8", layout=["plain"]), "no layout"),
    ("layout", lambda: pq.tensors.pack_(model(), "foo"), 'no layout "foo"'),
    ("search", lambda: pq.quantize_(model(), "w8", search="mes"), 'no search "mes".*"mse"'),
    ("search", lambda: pq.quantize_(model(), "w8", search=3), 'no search "3"'),
    ("algorithms", lambda: pq.quantize_(model(), "w8", algorithms="gptq"), "algorithms is a list"),
    ("algorithms", lambda: pq.quantize_(model(), "w8", algorithms=3), "algorithms is a list"),
    ("qparams", lambda: QuantizedTensor.from_float(X, W8, qparams=3), "qparams is QParams"),
    ("input", lambda: QuantizedTensor.from_float(X, W8, input=3), "input is the scheme"),
    ("scheme", lambda: QuantizedTensor.from_float(X, "w8"), "scheme is the scheme of one"),
    ("search", lambda: QuantizedTensor.from_float(X, W8, search="mes"), 'no search "mes"'),
    ("values", lambda: QuantizedTensor.from_float([1.0], W8), "values is a tensor, found"),
    ("values", lambda: quantized().requantize_(torch.ones(8, 63)), r"values are \(8, 64\), found"),
    ("values", lambda: quantized().requantize_(3), "values is a tensor, found 3"),
    ("values", lambda: pq.tensors.prune_2_4(torch.tensor(1.0)), "no fours"),
    ("values", lambda: pq.tensors.prune_2_4(None), "values is a tensor, found None"),
    ("gm", lambda: pq.tensors.load_graph(model(), None), "gm is a graph"),
    ("args", lambda: pq.tensors.to_graph(model(), None), "args is a tuple"),
    ("args", lambda: pq.tensors.to_graph(model(), X), "args is a tuple"),
    ("candidates", lambda: pq.auto_quantize(model(), X, candidates=()), "candidates is a list"),
    ("candidates", lambda: pq.auto_quantize(model(), X, candidates="w8"), "candidates is a list"),
    ("least_db", lambda: pq.auto_quantize(model(), X, least_db="a"), "least_db is a number"),
    ("cache", lambda: pq.auto_quantize(model(), X, cache=3), "cache is the path"),
    ("example", lambda: pq.auto_quantize(model(), None), "example_inputs is a tuple"),
    ("every", lambda: training.quantize_parameters(model(), "w8", every="1"), "every is a whole"),
    ("every", lambda: training.quantize_parameters(model(), "w8", every=0), "found 0"),
    (
        "grad_dtype",
        lambda: training.quantize_parameters(model(), "w8", torch.int8),
        "grad_dtype is",
    ),
    (
        "rounding",
        lambda: training.quantize_parameters(model(), "w8", rounding="up"),
        'rounding "up"',
    ),
    ("x", lambda: training.to_float8(torch.ones(4, dtype=torch.int32)), "x is a tensor of real"),
    ("x", lambda: training.to_float8(None), "x is a tensor, found None"),
    ("mm", lambda: training.Float8TrainingConfig(mm=3), "mm is a LinearMMConfig, found 3"),
    ("output", lambda: training.LinearMMConfig(output="x"), "output is a ScaledMMConfig"),
    ("emulate", lambda: training.ScaledMMConfig(emulate="no"), "emulate is True or False"),
    ("amax", lambda: training.Float8TrainingConfig(amax_history="4"), "amax_history is a whole"),
    ("flag", lambda: training.Int8TrainingConfig(quantize_grad_input=None), "grad_input is True"),
    ("lr", lambda: training.AdamW8bit(model().parameters(), lr="a"), "lr is a number"),
    ("lr", lambda: training.SGD4bit(model().parameters(), lr=float("nan")), "found nan"),
    ("lr", lambda: training.AdamW4bit(model().parameters(), lr=-1.0), "at least 0, found -1"),
    ("betas", lambda: training.AdamW8bit(model().parameters(), betas=(0.9,) * 3), "betas are two"),
    ("betas", lambda: training.AdamW8bit(model().parameters(), betas=None), "betas are two"),
    ("params", lambda: training.AdamW8bit(model()), "params are parameters"),
    ("params", lambda: training.SGD8bit(None), "params are parameters"),
    ("class", lambda: training.with_master_weights("SGD", model()), "optimizer_class is a class"),
    ("class", lambda: training.with_cpu_offload(nn.Linear, model()), "found the class Linear"),
    ("module", lambda: training.with_master_weights(SGD, None), "module is a model or"),
    (
        "module",
        lambda: training.with_master_weights(SGD, model().parameters()),
        'a dict with "params"',
    ),
    ("dtype", lambda: training.with_master_weights(SGD, model(), torch.int8), "dtype is a float"),
    ("values", lambda: training.with_master_weights(SGD, model(), values=[X]), "values is a state"),
    (
        "shape",
        lambda: training.with_master_weights(SGD, model(), values={"0.weight": X}),
        "has the shape",
    ),
    ("run", lambda: register_kernel(None, name="k"), "run is a function"),
    ("op", lambda: register_kernel(max, name="k", op="linaer"), '"linaer" is ever looked up'),
    ("formats", lambda: register_kernel(max, name="k", formats="int8"), "formats is a list of str"),
    ("dtypes", lambda: register_kernel(max, name="k", dtypes=["float32"]), "each of dtypes"),
    ("device", lambda: register_kernel(max, name="k", device=0), "device is the type"),
    ("name", lambda: unregister_kernel("linear_of_lims"), '"linear_of_lims"'),
    ("layout", lambda: register_layout(X), "layout is an object"),
    (
        "input",
        lambda: choose_qparams_affine(None, "SYMMETRIC", (1, 64), torch.int8),
        "input is a tensor",
    ),
    ("mapping", lambda: choose_qparams_affine(X, None, (1, 64), torch.int8), 'no mapping "None"'),
    ("block", lambda: choose_qparams_affine(X, "SYMMETRIC", "ab", torch.int8), "found 'ab'"),
    ("block", lambda: choose_qparams_affine(X, "SYMMETRIC", None, torch.int8), "found None"),
    (
        "scale",
        lambda: quantize_affine(X, (1, 64), torch.ones(3), None, torch.int8),
        r"\[4, 1\] blocks",
    ),
    ("scale", lambda: quantize_affine(X, (1, 64), None, None, torch.int8), "scale is a tensor"),
    (
        "zero",
        lambda: dequantize_affine(X, (1, 64), torch.ones(4), X, torch.int8),
        "zero_point has a value",
    ),
]


@pytest.mark.parametrize("case", OPTIONS, ids=lambda case: f"{case[0]}-{case[2][:24]}")
def test_option_when_it_is_wrong_then_the_error_names_it(case: Case):
    kernels, layouts = len(KERNELS), set(LAYOUTS)
    with pytest.raises(Pt2eQuantError, match=case[2]):
        case[1]()
    assert len(KERNELS) == kernels
    assert set(LAYOUTS) == layouts


@pytest.mark.parametrize("text", ["{not json", "[1]", '{"key": 3}', '{"key": [{"scheme": "w8"}]}'])
def test_auto_quantize_when_the_cache_is_another_file_then_keeps_it(text: str, tmp_path: Path):
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ArtifactError, match=r"times\.json holds no times"):
        pq.auto_quantize(model(), X, cache=path)
    assert path.read_text() == text


def test_files_when_they_cannot_be_read_or_written_then_say_which(tmp_path: Path):
    bad = tmp_path / "bad.safetensors"
    bad.write_text("{not a header")
    for path in (tmp_path / "missing.safetensors", bad, tmp_path):
        with pytest.raises(ArtifactError, match=path.name):
            pq.tensors.load_module(model(), path)
    with pytest.raises(ArtifactError, match="cannot be written"):
        pq.tensors.save_module(model(), tmp_path / "no" / "folder")
    with pytest.raises(ArtifactError, match="no folder"):
        pq.auto_quantize(model(), X, cache=tmp_path / "no" / "times.json")
    with pytest.raises(ConfigError, match="path is the path of a file, found 3"):
        pq.tensors.save_module(model(), 3)


class ByName(nn.Module):
    """Calls its linear with a named argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(input=x)
        return found


@pytest.mark.parametrize("how", ["static", "prune", "auto", "qat"])
def test_input_when_a_module_is_called_by_name_then_it_is_seen(how: str):
    torch.manual_seed(0)
    module, x = ByName(), torch.randn(16, 64)
    expected = module(x)
    if how == "static":
        pq.quantize_(module, "int8", calibration_data=[x])
    elif how == "prune":
        pq.tensors.prune_2_4_(module, [x])
    elif how == "auto":
        with contextlib.redirect_stdout(None):
            pq.auto_quantize(module, (x,))
    else:
        training.prepare_qat_(module, "int8")
        module(x)
        training.convert_qat_(module)
    assert pq.sqnr_db([expected], [module(x)]) > (5 if how == "prune" else 25)


def test_copy_when_the_source_broadcasts_then_it_does_as_for_float():
    tensor = quantized()
    tensor.copy_(torch.arange(64.0))
    assert torch.allclose(tensor.dequantize()[3], torch.arange(64.0), atol=0.25)
    with pytest.raises(RuntimeError, match="expanded size"):
        tensor.copy_(torch.ones(3, 3))


TRAINING_CALLS: dict[str, Callable[[nn.Module], Any]] = {
    "quantize_parameters": lambda m: training.quantize_parameters(m, "w8"),
    "convert_to_float8": training.convert_to_float8_training,
    "convert_to_int8": training.convert_to_int8_training,
    "prepare_qat_": lambda m: training.prepare_qat_(m, "w8"),
}


@pytest.mark.parametrize("name", TRAINING_CALLS)
def test_weight_when_other_parameters_make_it_then_the_error_names_it(name: str):
    module = nn.Sequential(nn.Linear(64, 32), nn.utils.spectral_norm(nn.Linear(32, 8)))
    before = list(module)
    with pytest.raises(ConfigError, match=r'"1.*computed from other parameters') as caught:
        TRAINING_CALLS[name](module)
    assert "filter" in str(caught.value.fix)
    assert list(module) == before
    assert module[0].weight is before[0].weight
