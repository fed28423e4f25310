"""Small models quantized by a recipe with algorithms, and what they lose."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import pt2e_quant as pq


@pytest.fixture
def quantized(integers_everywhere: None) -> Callable[..., GraphModule]:
    """Quantizes a model by a recipe of the ONNX backend, with algorithms."""

    def quantize(
        model: nn.Module,
        data: Sequence[torch.Tensor],
        recipe: str,
        *algorithms: Any,
        search: str | None = None,
    ) -> GraphModule:
        quantizer = pq.backends.get("onnx").quantizer(recipe)
        if any(algorithm.name == "balance_channels" for algorithm in quantizer.algorithms):
            quantizer.remove_algorithm("balance_channels")
        if search is not None:
            quantizer.with_search(search)
        program = torch.export.export(model.eval(), (data[0],))
        prepared = pq.prepare_pt2e(program, quantizer, algorithms=algorithms)
        pq.calibrate(prepared, data, progress=False)
        return pq.convert_pt2e(prepared)

    return quantize


@pytest.fixture
def output_error() -> Callable[..., float]:
    """The mean square of the error of a graph's output."""

    def error(model: nn.Module, gm: GraphModule, data: Sequence[torch.Tensor]) -> float:
        with torch.no_grad():
            return float(torch.stack([(model(x) - gm(x)).square().mean() for x in data]).mean())

    return error
