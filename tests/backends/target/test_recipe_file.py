import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends import get
from pt2e_quant.backends.target.recipe_file import NodeScheme, RecipeFile, read_recipe
from pt2e_quant.core.errors import ArtifactError, ConfigError
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.static.mse import MSEObserver
from pt2e_quant.observers.weights.weight_search import WeightSearch

STATIC_ALGORITHMS = {
    "pair_scales",
    "pair_codes",
    "run_time_scales",
    "smooth_quant",
    "own_ranges",
    "saturation_limits",
    "choose_ranges",
    "block_gptq",
    "keep_float",
    "bias_correction",
}
MADE = RecipeFile(
    backend="onnx",
    recipe="int8",
    ranges="min_max",
    without=tuple(sorted(STATIC_ALGORITHMS)),
    rules=(
        NodeScheme(node="linear_3", scheme="float", why='costs 12 "dB"\nalone'),
        NodeScheme(node="linear*", scheme="int8_dynamic"),
        NodeScheme(node="linear_4", scheme="int8", ranges="mse", algorithms=("gptq",)),
    ),
)


def test_recipe_file_when_saved_and_read_then_the_same(tmp_path):
    path = tmp_path / "recipe.toml"
    MADE.save(path)
    assert read_recipe(path) == MADE
    assert pq.read_recipe(str(path)).rules[0].why == 'costs 12 "dB"\nalone'


def test_recipe_file_when_made_a_quantizer_then_every_field_counts(tmp_path):
    MADE.save(tmp_path / "recipe.toml")
    found = get("onnx").quantizer(str(tmp_path / "recipe.toml"))
    assert found.observers.activation is MinMaxObserver
    assert {"gptq"} <= {algorithm.name for algorithm in found.algorithms} == found.ruled_algorithms
    schemes = [rule.scheme and rule.scheme.name for rule in found.rules[-3:]]
    assert schemes == [None, "int8_dynamic", "int8"]
    assert [rule.pattern for rule in found.rules[-3:]] == ["linear_3", "linear*", "linear_4"]
    last = found.rules[-1]
    assert (last.observers.activation, last.algorithms) == (MSEObserver, {"gptq"})


@pytest.mark.usefixtures("unmeasured")
def test_recipe_file_when_given_by_path_or_as_it_is_then_the_same_quantizer(tmp_path):
    path = tmp_path / "recipe.toml"
    MADE.save(path)
    expected = get("onnx").quantizer(str(path)).rules
    for given in (path, MADE):
        assert get("onnx").quantizer(given).rules == expected
    model = nn.Sequential(nn.Linear(8, 8)).eval()
    recipe = RecipeFile(backend="cpu", recipe="int8_dynamic")
    artifact = pq.quantize(model, (torch.ones(2, 8),), backend="cpu", recipe=recipe)
    assert artifact.report.backend == "oneDNN"
    with pytest.raises(ConfigError, match="a name or a recipe file, found int"):
        get("onnx").quantizer(8)


def test_recipe_file_when_a_rule_has_ranges_and_algorithms_then_its_node_alone_gets_them():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4))
    data = [torch.randn(32, 16)]
    rule = NodeScheme(node="linear_1", scheme="int8_minmax", ranges="mse", algorithms=("gptq",))
    recipe = RecipeFile(backend="xnnpack", recipe="int8_minmax", rules=(rule,))
    program = torch.export.export(model.eval(), (data[0],))
    prepared = pq.prepare(program, recipe.quantizer(get("xnnpack")))
    gm = pq.convert(pq.calibrate(prepared, data, progress=False))
    records = {r.name: r for r in pq.provenance_of(gm).tensors}
    assert {name for name, r in records.items() if r.steps} == {"2.weight"}
    assert {name for name, r in records.items() if "MSE" in r.observer} == {"linear_1"}


def test_recipe_file_when_a_rule_names_a_recipe_then_its_search_and_algorithms_come_with_it():
    rules = (NodeScheme(node="a", scheme="w4_g32"), NodeScheme(node="b", scheme="int8"))
    found = RecipeFile(backend="onnx", recipe="w8", rules=rules).quantizer(get("onnx"))
    few_bits, static = found.rules[-2:]
    assert few_bits.observers.search is WeightSearch.MSE
    assert static.algorithms == STATIC_ALGORITHMS
    assert found.ruled_algorithms == STATIC_ALGORITHMS


def test_recipe_file_when_a_float_node_has_ranges_then_refused():
    with pytest.raises(ConfigError, match="leaves it float"):
        NodeScheme(node="a", scheme="float", ranges="mse")
    with pytest.raises(ConfigError, match='did you mean "min_max"'):
        NodeScheme(node="a", scheme="int8", ranges="minmax")


def test_recipe_file_when_of_another_backend_then_refused():
    with pytest.raises(ConfigError, match='of backend "onnx", not of "cpu"'):
        MADE.quantizer(get("cpu"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backend = ", "no TOML"),
        ('recipe = "int8"', "incomplete"),
        ('backend = "onnx"\nreciep = "int8"', 'did you mean "recipe"'),
        ('backend = "onnx"\n[[rule]]\nnode = "a"', "incomplete"),
        ('backend = "onnx"\nranges = "minmax"', 'did you mean "min_max"'),
        ('backend = "onnx"\nversion = 2', "version 2"),
    ],
)
def test_read_recipe_when_the_file_is_wrong_then_says_where(tmp_path, text, message):
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_recipe(path)


def test_recipe_file_when_the_path_is_wrong_then_says_so(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_recipe(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match=r"ends in \.toml"):
        MADE.save(tmp_path / "recipe.yaml")
    with pytest.raises(ArtifactError, match="cannot write"):
        MADE.save(tmp_path / "no" / "recipe.toml")
