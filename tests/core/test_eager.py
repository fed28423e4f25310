"""Arithmetic that writes into its own tensors does so in eager runs alone."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from pt2e_quant.core.eager import is_eager
from pt2e_quant.core.formats.format_arithmetic import quantize_float
from pt2e_quant.core.scheme_names import scheme_named
from pt2e_quant.tensors import QuantizedTensor
from pt2e_quant.tensors.values import decode


def mutating(graph: torch.fx.Graph) -> list[str]:
    """The operators of a graph that write into an argument."""
    called = [node.target for node in graph.nodes if node.op == "call_function"]
    return [str(op) for op in called if getattr(op, "_schema", None) and op._schema.is_mutable]


def test_is_eager_when_traced_or_compiled_then_false():
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(is_eager(x))
        return x + 1

    look(torch.ones(2))
    make_fx(look)(torch.ones(2))
    make_fx(look, tracing_mode="fake")(torch.ones(2))
    torch.compile(look, backend="eager", fullgraph=True)(torch.ones(2))
    assert seen == [True, False, False, False]
    assert is_eager(torch.nn.Parameter(torch.ones(2))) is False


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_block_arithmetic_when_traced_then_nothing_mutates_and_equals_eager(mode):
    x, scales = torch.randn(4, 8) * 300, torch.rand(4, 1) + 0.5
    weight = QuantizedTensor.from_float(torch.randn(4, 8), scheme_named("w8").weight)

    def codes(x: Tensor, scales: Tensor) -> Tensor:
        return quantize_float(x, scales, None, [1, -1], "float8_e4m3fn")

    def values(codes: Tensor, scale: Tensor) -> Tensor:
        return decode({"codes": codes, "scale": scale}, weight.form)

    parts = weight.plain_parts()
    for run, inputs in ((codes, (x, scales)), (values, (parts["codes"], parts["scale"]))):
        before = [value.clone() for value in inputs]
        graph = make_fx(run, tracing_mode=mode)(*inputs)
        assert not mutating(graph.graph)
        assert torch.equal(graph(*inputs).float(), run(*inputs).float())
        for value, old in zip(inputs, before, strict=True):
            assert torch.equal(value, old)  # what the caller holds is never written into
