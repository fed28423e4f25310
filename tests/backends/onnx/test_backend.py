"""The backend's face: recipes, and what it says when its extra is missing."""

import builtins
from typing import Any

import pytest
import torch

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError, MissingExtraError


def test_recipes_when_listed_then_int8_is_explained() -> None:
    assert "uint8" in pq.backends.get("onnx").recipes["int8"]


def test_quantizer_when_recipe_is_unknown_then_near_names_are_offered() -> None:
    with pytest.raises(ConfigError, match='did you mean "int8"'):
        pq.backends.get("onnx").quantizer("in8")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_lower_when_a_package_is_missing_then_the_command_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    backend = pq.backends.get("onnx")
    for call in (
        lambda: backend.lower(torch.fx.GraphModule({}, torch.fx.Graph())),
        lambda: backend.load("model.onnx"),
    ):
        with pytest.raises(MissingExtraError, match=package) as error:
            call()
        assert "pip install 'pt2e-quant[onnx]'" in str(error.value)
