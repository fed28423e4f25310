"""q/dq written out: the same integers and the same floats to the last bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import Dim, export

from pt2e_quant.core.qdq import (
    DequantizePerChannel,
    DequantizePerTensor,
    QuantizePerChannel,
    QuantizePerTensor,
    is_qdq,
)
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.strip_guards import strip_guards
from pt2e_quant.passes.reference.write_integers import decompose_qdq

LIBRARY = torch.ops.quantized_decomposed
LIMITS = (-128, 127, torch.int8)


class Static(nn.Module):
    def __init__(self, scale: float, zero_point: int) -> None:
        super().__init__()
        self.arguments = (scale, zero_point, *LIMITS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = QuantizePerTensor(x, *self.arguments)
        return q, DequantizePerTensor(q, *self.arguments)


class Dynamic(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen = LIBRARY.choose_qparams.tensor(x, -128, 127, 1e-6, torch.int8)
        q = LIBRARY.quantize_per_tensor.tensor(x, *chosen, *LIMITS)
        return q, LIBRARY.dequantize_per_tensor.tensor(q, *chosen, *LIMITS)


class Channels(nn.Module):
    def __init__(self, axis: int, count: int, zero_point: int) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(count) + 0.01)
        zeros = torch.arange(count) * zero_point
        self.register_buffer("zero_point", zeros)
        self.axis = axis

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        arguments = (self.scale, self.zero_point, self.axis, *LIMITS)
        q = QuantizePerChannel(x, *arguments)
        return q, DequantizePerChannel(q, *arguments)


class Branch(nn.Module):
    """The scales reach the body of a branch as inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.channels = Channels(1, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > 0, lambda y: self.channels(y)[1], lambda y: self.channels(y)[1] + 1, (x,)
        )


def spelled(model, x, shapes=None):
    program = export(model, (x,), dynamic_shapes=shapes)
    before, after = program.module(), program.module()
    bodies = [m for m in after.modules() if isinstance(m, torch.fx.GraphModule)]
    for gm in bodies:
        run_passes(gm, (strip_guards, decompose_qdq()))
        assert not [n for n in gm.graph.nodes if is_qdq(n)]
    return before, after


MODELS = st.one_of(
    st.builds(Static, st.floats(1e-4, 10.0), st.integers(-128, 127)),
    st.builds(Dynamic),
    st.builds(Channels, st.just(0), st.just(2), st.integers(-2, 2)),
    st.builds(Channels, st.just(1), st.just(3), st.integers(-2, 2)),
    st.builds(Channels, st.just(2), st.just(1), st.integers(-2, 2)),
)


@settings(max_examples=25)
@given(MODELS, st.integers(0, 1000), st.sampled_from([1e-3, 1.0, 300.0]))
def test_decompose_when_values_are_random_then_equal_to_the_last_bit(model, seed, spread):
    x = torch.randn(2, 3, 1, generator=torch.Generator().manual_seed(seed)) * spread
    before, after = spelled(model, x)
    assert all(torch.equal(a, b) for a, b in zip(before(x), after(x), strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_decompose_when_half_precision_then_quantized_from_float32(dtype):
    x = torch.linspace(-3, 3, 24).reshape(2, 3, 4).to(dtype)
    before, after = spelled(Static(0.02, 5), x)
    assert torch.equal(before(x)[0], after(x)[0])


def test_decompose_when_scales_are_inputs_of_a_body_then_read_there():
    x = torch.linspace(-1, 2, 6).reshape(2, 3)
    before, after = spelled(Branch(), x)
    for sign in (1, -1):
        assert torch.equal(before(sign * x), after(sign * x))


def test_decompose_when_sizes_are_dynamic_then_other_sizes_match():
    x = torch.randn(2, 3, 4)
    before, after = spelled(Channels(1, 3, 1), x, ({0: Dim("n", max=9)},))
    y = torch.randn(7, 3, 4)
    assert torch.equal(before(y)[1], after(y)[1])


def test_decompose_when_layout_is_other_or_run_twice_then_left_alone(program):
    class Grouped(nn.Module):
        def forward(self, w: Tensor, s: Tensor, z: Tensor) -> Tensor:
            arguments = (-8, 7, torch.int8, 2, torch.float32)
            return LIBRARY.dequantize_per_channel_group(w, s, z, *arguments)

    w = torch.ones(2, 4, dtype=torch.int8)
    p = program(Grouped(), (w, torch.ones(2, 2), torch.zeros(2, 2)))
    assert not p.apply(decompose_qdq()).changed
    q = program(Static(0.1, 3), (torch.randn(2, 3),)).apply(decompose_qdq())
    assert q.changed
    q.is_idempotent(decompose_qdq())
