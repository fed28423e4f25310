"""Values keep their names and their constants, however many operators are alike."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import pt2e_quant as pq

pytest.importorskip("onnxruntime")

LIMITS = {
    "clamp": lambda x, low, high: x.clamp(low, high),
    "min and max": lambda x, low, high: x.clamp(max=high).clamp(min=low),
    "max and min": lambda x, low, high: x.clamp(min=low).clamp(max=high),
    "relu": lambda x, low, high: torch.relu(x).clamp(low, high),
    "twice": lambda x, low, high: x.clamp(low - 1, high).clamp(low, high + 1),
}


class Limited(nn.Module):
    """Limits of one input, and a linear that has integers."""

    def __init__(self, steps: list[tuple[str, float, float]]) -> None:
        super().__init__()
        self.steps, self.linear = steps, nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        limited = [LIMITS[kind](y, low, low + width) for kind, low, width in self.steps]
        return self.linear(x), *(2 * part for part in limited)


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(st.sampled_from(list(LIMITS)), st.sampled_from((-2, -1, 0.5)), st.just(1.5)),
        min_size=2,
        max_size=5,
    )
)
def test_limits_when_several_are_of_one_value_then_each_has_its_own(steps):
    x, y = torch.ones(2, 8), torch.linspace(-4, 4, 16).reshape(2, 8)
    model = Limited(steps).eval()
    artifact = pq.quantize(model, (x, y), backend="onnx", recipe="w8", progress=False)
    for found, expected in zip(artifact.run(x, y)[1:], model(x, y)[1:], strict=True):
        assert torch.equal(found, expected)
