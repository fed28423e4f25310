"""The backend's face: recipes, and what it says when its extra is missing."""

import sys
from dataclasses import replace
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
    # As Python marks a package that may not be imported.
    monkeypatch.setitem(sys.modules, package, None)
    backend = pq.backends.get("onnx")
    for call in (
        lambda: backend.lower(torch.fx.GraphModule({}, torch.fx.Graph())),
        lambda: backend.load("model.onnx"),
    ):
        with pytest.raises(MissingExtraError, match=package) as error:
            call()
        assert "pip install 'pt2e-quant[onnx]'" in str(error.value)


def test_lower_when_a_package_is_there_but_broken_then_the_command_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> Any:
        raise ImportError("cannot import name 'x'", name="onnxruntime.capi")

    backend = replace(pq.backends.get("onnx"), lowering=broken)
    with pytest.raises(MissingExtraError, match="onnxruntime"):
        backend.load("model.onnx")
