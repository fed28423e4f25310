import pytest

import pt2e_quant as pq
from pt2e_quant.backends import get
from pt2e_quant.backends.target.recipe_file import NodeScheme, RecipeFile, read_recipe
from pt2e_quant.core.errors import ArtifactError, ConfigError
from pt2e_quant.observers.static.minmax import MinMaxObserver

MADE = RecipeFile(
    backend="onnx",
    recipe="int8",
    ranges="min_max",
    without=("smooth_quant",),
    rules=(
        NodeScheme(node="linear_3", scheme="float", why='costs 12 "dB"\nalone'),
        NodeScheme(node="linear*", scheme="int8_dynamic"),
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
    assert found.algorithms == ()
    assert [rule.scheme and rule.scheme.name for rule in found.rules[-2:]] == [None, "int8_dynamic"]
    assert [rule.pattern for rule in found.rules[-2:]] == ["linear_3", "linear*"]


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
