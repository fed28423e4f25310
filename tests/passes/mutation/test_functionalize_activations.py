import copy

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from torch import nn

from pt2e_quant.graph.alias import mutated_buffers, mutated_roots
from pt2e_quant.passes.mutation.functionalize_activations import (
    functionalize_activations,
    no_activation_writes,
)

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Call(nn.Module):
    """A function as a model, with a buffer to write."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x):
        return self.body(self, x)


def activation_writes(gm) -> list[str]:
    return [root.name for root in mutated_roots(gm.graph) if root.op == "call_function"]


def test_relu_when_in_place_then_becomes_relu(program):
    p = program(Call(lambda m, x: F.relu_(x + 1)), (X,))
    p.apply(functionalize_activations)
    p.shows(
        """
        x: f32[3, 4] = input
        add: f32[3, 4] = add(x, 1)
        relu: f32[3, 4] = relu(add)
        return (relu)
        """
    )
    p.matches(rtol=0, atol=0).is_idempotent(functionalize_activations)


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.pow_(-0.5),
        lambda y: y.pow_(y),
        lambda y: y.floor_divide_(y + 1),
        lambda y: y.ldexp_(torch.tensor(2)),
    ],
    ids=["number", "tensor", "quotient", "exponent"],
)
def test_write_when_its_twin_has_another_overload_name_then_as_in_eager(program, write):
    p = program(Call(lambda m, x: write(x.abs() + 1)), (X,))
    p.apply(functionalize_activations)
    assert activation_writes(p.gm) == []
    p.matches(rtol=0, atol=0).is_idempotent(functionalize_activations)


def test_write_when_the_tensor_has_aliases_then_every_alias_sees_it(program):
    def body(m, x):
        y = x * 2
        row = y[1]
        flat = y.view(-1)
        flat[2:6].mul_(3)
        return y, row, flat.sum()

    p = program(Call(body), (X,)).apply(functionalize_activations)
    p.shows(
        """
        x: f32[3, 4] = input
        mul: f32[3, 4] = mul(x, 2)
        view: f32[12] = view(mul, [-1])
        slice: f32[4] = slice(view, start=2, end=6)
        mul_1: f32[4] = mul(slice, 3)
        slice_scatter: f32[12] = slice_scatter(view, mul_1, start=2, end=6)
        reshape: f32[3, 4] = reshape(slice_scatter, [3, 4])
        sum: f32[] = sum(slice_scatter)
        select: f32[4] = select(reshape, 0, 1)
        return (reshape, select, sum)
        """
    )
    p.matches(rtol=0, atol=0).is_idempotent(functionalize_activations)


def test_slice_when_written_by_assignment_then_functional_and_equal(program):
    def body(m, x):
        y = x.clone()
        y[:, 0] += 1
        y[1:, 2:] = 5.0
        return y

    p = program(Call(body), (X,)).apply(functionalize_activations)
    assert activation_writes(p.gm) == []
    p.matches(rtol=0, atol=0)


def test_write_when_it_goes_to_a_buffer_then_kept(program):
    def body(m, x):
        m.count.add_(1)
        y = x + m.count
        y.mul_(2)
        m.count[1:].copy_(y[0, 1:])
        return y + m.count

    p = program(Call(body), (X,)).apply(functionalize_activations)
    assert mutated_buffers(p.gm) == ("count",)
    assert activation_writes(p.gm) == []
    assert p.skips == ['add_ writes "count": kept', 'copy_ writes "count": kept']
    eager, compiled = copy.deepcopy(p.model), p.gm
    for _ in range(3):
        assert torch.equal(eager(X), compiled(X))
    assert torch.equal(eager.count, compiled.count)


def test_value_when_copied_from_a_buffer_then_later_writes_miss_it(program):
    def body(m, x):
        y = x[0] * 1
        y.copy_(m.count)
        m.count.add_(1)
        return y

    p = program(Call(body), (X,)).apply(functionalize_activations)
    assert "clone(count)" in p.text
    p.matches(rtol=0, atol=0)


def test_write_when_it_goes_to_an_input_then_kept(program):
    p = program(Call(lambda m, x: x.relu_() + 1), (X,))
    p.apply(functionalize_activations)
    assert p.skips == ["relu_ writes an input: kept"]
    given_ = X.clone()
    p.gm(given_)
    assert torch.equal(given_, X.relu())


def test_write_when_the_result_has_another_dtype_then_cast_back(program):
    def body(m, x):
        y = x.to(torch.bfloat16)
        y.mul_(m.count.float() + 1.5)
        return y

    p = program(Call(body), (X,)).apply(functionalize_activations)
    assert "bf16[3, 4] = to(mul, bf16)" in p.text
    p.matches(rtol=0, atol=0)


def test_functionalize_when_shapes_are_dynamic_then_other_sizes_match(program):
    def body(m, x):
        y = x * 2
        y.view(-1).add_(1)
        y[1:].neg_()
        return y

    rows = torch.export.Dim("rows", min=3, max=9)
    p = program(Call(body), (X,), ({0: rows},)).apply(functionalize_activations)
    assert activation_writes(p.gm) == []
    p.matches((torch.randn(7, 4),), rtol=0, atol=0)


def test_write_when_its_view_cannot_be_undone_then_declined(program):
    def body(m, x):
        y = x * 2
        y.unfold(0, 2, 2).mul_(3)
        return y

    p = program(Call(body), (X,)).apply(functionalize_activations)
    assert p.skips == ["mul_ writes through unfold, a view that cannot be undone"]
    assert no_activation_writes.check(p.gm) is None, "a declined write is no broken promise"
    p.matches(rtol=0, atol=0)


def test_write_when_it_has_no_out_of_place_form_then_declined(program):
    p = program(Call(lambda m, x: (x * 2).normal_()), (X,))
    result = functionalize_activations(p.gm)
    assert not result.changed
    assert [n.text for n in result.notes] == ["normal_ has no out-of-place form"]


VIEWS = {
    "row": lambda t: t[1],
    "rows": lambda t: t[1:],
    "column": lambda t: t[..., 0],
    "step": lambda t: t[..., ::2],
    "flat": lambda t: t.reshape(-1),
    "view": lambda t: t.view(-1) if t.is_contiguous() else t.reshape(-1),
    "transposed": lambda t: t.transpose(0, -1),
    "permuted": lambda t: t.permute(*reversed(range(t.dim()))),
    "unsqueezed": lambda t: t.unsqueeze(0),
    "squeezed": lambda t: t.unsqueeze(-1).squeeze(-1),
    "split": lambda t: t.split(1, 0)[-1],
    "chunk": lambda t: t.chunk(2, -1)[0],
    "unbind": lambda t: t.unbind(0)[0],
    "narrow": lambda t: t.narrow(0, 0, 1),
    "same_dtype": lambda t: t.to(torch.float32),
    "detached": lambda t: t.detach(),
    "flattened": lambda t: t.flatten(),
}
WRITES = {
    "add": lambda t: t.add_(1),
    "relu": lambda t: t.relu_(),
    "scale": lambda t: t.mul_(-2),
    "fill": lambda t: t.fill_(0.5),
    "zero": lambda t: t.zero_(),
    "clamp": lambda t: t.clamp_(-1, 1),
    "double": lambda t: t.add_(t),
    "masked": lambda t: t.masked_fill_(t > 0, -3.0),
    "copy": lambda t: t.copy_(t * 0.5 + 1),
}

# Each step reads one of the values made so far: (value, "view" or "write", its name).
STEPS = st.lists(
    st.tuples(
        st.integers(0, 100),
        st.one_of(
            st.tuples(st.just("view"), st.sampled_from(sorted(VIEWS))),
            st.tuples(st.just("write"), st.sampled_from(sorted(WRITES))),
        ),
    ),
    min_size=1,
    max_size=7,
)


def interpret(steps, x, buffer):
    """Run the steps on two activations and a buffer; all values made on the way."""
    values = [x * 2, x + 1, buffer]
    for index, (kind, name) in steps:
        value = values[index % len(values)]
        if kind == "write":
            values.append(WRITES[name](value))
        elif value.dim() and min(value.shape) > 1:
            values.append(VIEWS[name](value))
    return values


def holds(steps) -> None:
    """Hold a program against eager, twice: the second run starts from the written buffer."""
    model = Call(lambda m, x: interpret(steps, x, m.count))
    gm = torch.export.export(model, (X,)).module()
    functionalize_activations(gm)
    assert activation_writes(gm) == []
    eager = copy.deepcopy(model)
    for _ in range(2):
        for expected, found in zip(eager(X), gm(X), strict=True):
            assert torch.equal(expected, found)
        assert torch.equal(eager.count, gm.count)


@given(steps=STEPS)
@settings(max_examples=40, suppress_health_check=list(HealthCheck))
def test_functionalize_when_views_and_writes_are_random_then_matches_eager(steps):
    holds(steps)


@pytest.mark.parametrize("name", sorted(WRITES))
def test_write_when_through_each_view_then_matches_eager(name):
    for view in sorted(VIEWS):
        holds([(0, ("view", view)), (3, ("write", name)), (0, ("view", "row"))])
