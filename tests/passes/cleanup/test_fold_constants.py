import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.qdq import DequantizePerTensor
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.fold_constants import GROWTH_LIMIT_BYTES, fold_constants
from pt2e_quant.passes.cleanup.inline_regions import inline_regions
from pt2e_quant.pt2e import disable_observer
from tests.call_function import Call

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def test_weight_when_parametrized_then_becomes_a_plain_weight(program):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))

        def forward(self, x):
            return self.fc(x)

    p = program(Normed(), (X,))
    p.apply(fold_constants, drop_dead_constants)
    p.shows(
        """
        x: f32[3, 4] = input
        linear: f32[3, 5] = linear(x, fc.weight, bias=fc.bias)
        return (linear)
        """
    )
    assert set(p.gm.state_dict()) == {"fc.weight", "fc.bias"}
    p.matches().leaves_model_alone().is_idempotent(fold_constants)


def test_cast_when_autocast_made_it_then_folds_into_the_weight(program):
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.fc(x)

    p = program(Cast(), (X,)).apply(inline_regions, fold_constants)
    p.shows(
        """
        x: f32[3, 4] = input
        to: bf16[3, 4] = to(x, bf16)
        linear: bf16[3, 4] = linear(to, fc.weight, bias=fc.bias)
        return (linear)
        """
    )
    assert p.gm.fc.weight.dtype == torch.bfloat16
    p.matches(rtol=0, atol=0).leaves_model_alone()


def test_computations_when_equal_then_share_one_constant(program):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return F.linear(x, self.w * 2), F.linear(x, self.w * 2), F.linear(x, self.w)

    p = program(Twice(), (X,)).apply(fold_constants)
    assert set(p.gm.state_dict()) == {"w", "folded_weight"}
    p.matches().leaves_model_alone()


def test_mask_when_made_from_constants_then_folded(program):
    class Made(nn.Module):
        def forward(self, x):
            return x @ torch.ones(4, 4).tril()

    p = program(Made(), (X,)).apply(fold_constants)
    assert list(p.targets()) == ["aten.matmul.default"]
    p.matches()


def test_window_when_made_of_numbers_alone_then_folded(program):
    class Framed(nn.Module):
        def forward(self, x):
            window = torch.hamming_window(4, periodic=False) + torch.blackman_window(4)
            return x * window + torch.randn(4).clamp(0, 0) + torch.zeros_like(torch.empty(4))

    p = program(Framed(), (X,)).apply(fold_constants)
    calls = [str(node.target) for node in p.gm.graph.nodes if node.op == "call_function"]
    assert not [name for name in calls if "window" in name]
    assert {"aten.randn.default", "aten.empty.memory_format"} <= set(calls)


def test_constant_when_permuted_then_stored_contiguously(program):
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(8, 3)
            self.register_buffer("places", torch.arange(16).reshape(4, 4) % 8)

        def forward(self, x):
            return x + self.table(self.places).permute(2, 0, 1).unsqueeze(0)

    p = program(Biased(), (X.reshape(3, 1, 4)[None],)).apply(fold_constants, drop_dead_constants)
    (held,) = p.gm.state_dict().values()
    assert held.shape == (1, 3, 4, 4)
    assert held.is_contiguous()
    p.matches(rtol=0, atol=0).leaves_model_alone().is_idempotent(fold_constants)


def test_scaled_query_when_it_has_one_row_then_has_plain_strides(program):
    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.probe = nn.Parameter(torch.ones(1, 3, 4))

        def forward(self, x):
            return torch.bmm(self.probe.transpose(0, 1) * 0.5, x[..., None])

    p = program(Probe(), (X,)).apply(fold_constants, drop_dead_constants)
    (held,) = p.gm.state_dict().values()
    assert (held.shape, held.stride()) == ((3, 1, 4), (4, 4, 1))
    p.matches(rtol=0, atol=0).leaves_model_alone()


def test_result_when_far_larger_than_its_operands_then_left_computed(program):
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 1))

        def forward(self, x):
            return x @ (self.w.expand(4, 200_000) + 0.0)

    p = program(Wide(), (X,)).apply(fold_constants)
    growth = 4 * 4 * 200_000 - 4 * 4
    assert growth > GROWTH_LIMIT_BYTES
    assert p.skips == [f"folding would add {growth} bytes"]
    assert not p.changed


def test_fold_when_buffers_are_written_or_values_random_then_they_stay(program):
    class Stay(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(4))
            self.register_buffer("q", torch.ones(4, dtype=torch.int8))

        def forward(self, x):
            self.count.add_(1)
            w = DequantizePerTensor(self.q, 0.5, 0, -128, 127, torch.int8)
            return x * (self.count + 1) * w + torch.rand_like(self.q, dtype=torch.float32)

    p = program(Stay(), (X,))
    before = p.text
    assert not fold_constants(p.gm).changed
    assert p.text == before


class FirstStep(nn.Module):
    """A step of a loop from a state of ones, whose product is read twice."""

    def __init__(self, reads_integers):
        super().__init__()
        self.reads_integers = reads_integers
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        made = self.inner(torch.ones(3, 4))
        return self.outer(made) + x if self.reads_integers else torch.tanh(made + x)


@pytest.mark.parametrize("reads_integers", [True, False])
def test_product_of_constants_when_trained_then_a_constant_of_the_same_values(reads_integers):
    torch.manual_seed(0)
    program = torch.export.export(FirstStep(reads_integers).train(), (X,))
    prepared = pq.prepare_qat_pt2e(program, pq.backends.get("xnnpack").quantizer("int8"))
    prepared(X).sum().backward()
    assert prepared.get_parameter("inner.weight").grad is not None
    prepared.eval().apply(disable_observer)
    expected = prepared(X)
    converted = pq.convert_pt2e(prepared)
    assert torch.equal(converted(X), expected)
    assert not [n for n in converted.graph.nodes if n.target is torch.ops.aten.linear.default]


class Chain(nn.Module):
    """The same operator on its own result, each quantized."""

    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4)

    def forward(self, x):
        value = self.table
        for _ in range(3):
            value = value + value
        return self.last(x + value)


def test_same_operator_on_its_own_result_when_trained_then_each_is_computed():
    torch.manual_seed(0)
    program = torch.export.export(Chain().train(), (X,))
    prepared = pq.prepare_qat_pt2e(program, pq.IntegerQuantizer())
    prepared(X).sum().backward()
    prepared.eval().apply(disable_observer)
    expected = prepared(X)
    assert torch.equal(pq.convert_pt2e(prepared)(X), expected)


def shifted_windows(x):
    """A mask as Swin makes it: areas are numbered, pairs of pixels in different areas masked."""
    areas = x.new_zeros((4, 4))
    for number, rows in enumerate((slice(0, -2), slice(-2, -1), slice(-1, None))):
        areas[rows, 1:] = number
    areas = areas.reshape(-1)
    apart = areas.unsqueeze(0) - areas.unsqueeze(1)
    return apart.masked_fill(apart != 0, -100.0).masked_fill(apart == 0, 0.0)


def test_mask_when_written_into_zeros_then_becomes_a_constant(program):
    p = program(Call(lambda x: x @ x.mT + shifted_windows(x)), (torch.randn(16, 16),))
    p.apply(fold_constants, drop_dead_constants)
    names = [str(n.target) for n in p.gm.graph.nodes if n.op == "call_function"]
    assert sorted(set(names)) == ["aten.add.Tensor", "aten.mT.default", "aten.matmul.default"]
    p.matches(rtol=0, atol=0).leaves_model_alone().is_idempotent(fold_constants)


def test_fill_when_it_has_the_size_of_an_input_then_is_stored_only_as_a_part(program):
    p = program(Call(lambda x: torch.maximum(x, torch.zeros_like(x) + 0.5)), (X,))
    p.apply(fold_constants)
    assert not [n for n in p.gm.graph.nodes if n.target is torch.ops.aten.zeros_like.default]
    p.matches(rtol=0, atol=0)
    p = program(Call(lambda x: torch.maximum(x, torch.zeros_like(x))), (X,))
    p.apply(fold_constants)
    assert [n for n in p.gm.graph.nodes if n.target is torch.ops.aten.zeros_like.default]


STEPS = ("write", "write what was given", "read", "read a part", "view", "join", "add in place")


@given(st.lists(st.sampled_from(STEPS), max_size=8), st.sampled_from(["zeros", "like", "new"]))
@settings(max_examples=120, deadline=None)
def test_tensor_when_written_and_read_in_any_order_then_the_results_stay(steps, kind):
    def function(x):
        made = {"zeros": lambda: torch.zeros(3, 4), "like": lambda: torch.ones_like(x)}
        held = made.get(kind, lambda: x.new_full((3, 4), 2.0))()
        other, seen = torch.zeros(3, 4), x
        for number, step in enumerate(steps):
            match step:
                case "write":
                    held[number % 3] = number + 1.0
                case "write what was given":
                    held[:, number % 4] = x[:, 0]
                case "read":
                    seen = seen + held
                case "read a part":
                    seen = seen * (held[1:2] + 1)
                case "view":
                    held = held.view(4, 3).view(3, 4)
                case "join":
                    other[0] = held[number % 3] + 1
                    seen = seen - other
                case "add in place":
                    held.add_(other + 1)
        return seen

    gm = torch.export.export(Call(function), (X,)).module()
    run_passes(gm, (fold_constants,))
    for x in (X, X.flip(0)):
        torch.testing.assert_close(gm(x), function(x.clone()), rtol=0, atol=0)
        torch.testing.assert_close(gm(x), function(x.clone()), rtol=0, atol=0)
