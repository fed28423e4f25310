"""out_dtype with a gradient: exact forward, the float operator's gradient."""

import pytest
import torch

import pt2e_quant as pq
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.integer_ops.products import out_dtype

aten = torch.ops.aten


def integers(*shape, seed=0):
    made = torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed))
    return made.float().requires_grad_()


CASES = {
    "mm": (aten.mm.default, (integers(4, 9), integers(9, 3, seed=1))),
    "mul": (aten.mul.Tensor, (integers(4, 5), integers(4, 5, seed=1))),
    "add": (aten.add.Tensor, (integers(4, 5), integers(4, 5, seed=1))),
    "sub": (aten.sub.Tensor, (integers(4, 5), integers(5, seed=1))),
    "linear": (aten.linear.default, (integers(4, 9), integers(3, 9, seed=1))),
    "convolution": (
        aten.convolution.default,
        (
            *(integers(2, 3, 6, 6), integers(4, 3, 3, 3, seed=1), None),
            *([1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_out_dtype_when_floats_hold_integers_then_exact_with_the_float_gradient(name):
    op, args = CASES[name]
    leaves = [a.detach().clone().requires_grad_() for a in args if isinstance(a, torch.Tensor)]
    rest = args[len(leaves) :]
    held = [a.detach().to(torch.int32) for a in leaves]
    if op in (aten.add.Tensor, aten.sub.Tensor):  # torch's operator does not take them
        expected = op(*held, *rest)
    else:
        expected = torch.ops.higher_order.out_dtype(op, torch.int32, *held, *rest)
    total = out_dtype(op, torch.int32, *leaves, *rest)
    assert torch.equal(total, expected.double())
    found = torch.autograd.grad(total.square().sum(), leaves)
    doubles = [a.detach().double().requires_grad_() for a in leaves]
    wanted = torch.autograd.grad(op(*doubles, *rest).square().sum(), doubles)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-6, atol=0)


def test_out_dtype_of_torch_when_a_tensor_requires_grad_then_it_has_no_gradient():
    # Why the wrapper is there: it may go when torch has a formula.
    x, w = CASES["mm"][1]
    total = torch.ops.higher_order.out_dtype(aten.mm.default, torch.float32, x, w)
    with pytest.raises(RuntimeError, match="Autograd not implemented for out_dtype"):
        total.sum().backward()


def test_out_dtype_when_all_are_integers_then_that_of_torch():
    x, w = (a.detach().to(torch.int8) for a in CASES["mm"][1])
    total = pq.out_dtype(aten.mm.default, torch.int32, x, w)
    assert total.dtype is torch.int32
    assert torch.equal(total, x.int() @ w.int())


def test_out_dtype_when_compiled_then_as_in_eager():
    x, w = CASES["mm"][1]
    compiled = torch.compile(pq.out_dtype, backend="aot_eager")
    results = [f(aten.mm.default, torch.int32, x, w) for f in (out_dtype, compiled)]
    assert torch.equal(*results)
    grads = [torch.autograd.grad(r.sum(), (x, w)) for r in results]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_out_dtype_when_the_dtype_is_float_then_refused():
    with pytest.raises(UnsupportedError, match=r"int32 or int64, found torch\.float32"):
        out_dtype(aten.mm.default, torch.float32, *CASES["mm"][1])


def test_out_dtype_when_sums_of_int8_leave_it_then_exact():
    x = torch.full((3,), 127, dtype=torch.int8)
    assert pq.out_dtype(aten.add.Tensor, torch.int32, x, x).tolist() == [254, 254, 254]


def test_out_dtype_when_the_operator_is_another_then_refused():
    with pytest.raises(UnsupportedError, match=r"out_dtype takes no aten\.sigmoid"):
        out_dtype(aten.sigmoid.default, torch.int32, integers(3))
