import pytest

from pt2e_quant.analysis.tune import base_recipe
from pt2e_quant.backends import get
from pt2e_quant.backends.target.recipe_file import RecipeFile
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.passes.algorithms.gptq import Gptq


def test_base_recipe_when_a_file_is_named_then_algorithms_are_added(tmp_path):
    path = tmp_path / "a.toml"
    RecipeFile(backend="onnx", without=("smooth_quant",)).save(path)
    found = base_recipe(str(path), get("onnx"), ["gptq"], {})
    assert found == RecipeFile(backend="onnx", without=("smooth_quant",), algorithms=("gptq",))
    assert base_recipe("w8", get("cpu"), (), {}) == RecipeFile(backend="cpu", recipe="w8")


def test_base_recipe_when_an_argument_does_not_go_with_a_search_then_refused():
    with pytest.raises(ConfigError, match="search does not go with"):
        base_recipe("int8", get("onnx"), (), {"search": "mse"})
    with pytest.raises(ConfigError, match="algorithms by name"):
        base_recipe("int8", get("onnx"), [Gptq()], {})
    with pytest.raises(ConfigError, match="takes a recipe"):
        base_recipe(None, get("onnx"), (), {})
