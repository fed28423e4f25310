"""Softmaxes and means are found as models write them, and other quotients and means stay."""

import pytest
import torch
from torch import Tensor
from torch.export import Dim

from pt2e_quant.passes.cleanup.written_reductions import name_reductions
from tests.call_function import Call

X = torch.randn(2, 6, 4, 5, generator=torch.Generator().manual_seed(0))


def exponents(x: Tensor, dim: int = 1) -> Tensor:
    return (x - x.amax(dim, keepdim=True)).exp()


SOFTMAXES = {
    "shared": lambda x: (lambda e: e / e.sum(1, keepdim=True))(exponents(x)),
    "twice": lambda x: exponents(x) / exponents(x).sum(1, keepdim=True),
    "by_max": lambda x: (lambda e: e / e.sum(1, True))(
        torch.exp(x - x.max(1, keepdim=True).values)
    ),
    "detached": lambda x: (lambda e: e / e.sum(1, True))(
        torch.exp(x - x.max(1, keepdim=True)[0].detach())
    ),
    "negative_axis": lambda x: exponents(x, -3) / exponents(x, 1).sum(-3, keepdim=True),
    "plain": lambda x: x.exp() / x.exp().sum(1, keepdim=True),
}
MEANS = {
    "flatten": lambda x: x.flatten(2).mean(-1),
    "view": lambda x: x.view(x.shape[0], x.shape[1], -1).mean(2, keepdim=True),
    "reshape": lambda x: x.reshape(x.shape[0], 6, 20).mean(dim=2),
    "sum": lambda x: x.sum((2, 3)) / (x.shape[2] * x.shape[3]),
    "sum_of_channels": lambda x: x.sum(1, keepdim=True) / 6.0,
    "times": lambda x: x.sum(dim=[-1, -2]) * (1 / 20),
    "rows_then_columns": lambda x: x.mean(3).mean(2),
    "columns_then_rows": lambda x: x.mean(-2).mean(-1),
    "kept": lambda x: x.mean(2, keepdim=True).mean(-1, keepdim=True),
    "three": lambda x: x.mean(1).mean(-1).mean(1),
}
OTHERS = {
    "other_axis_of_sum": lambda x: exponents(x) / exponents(x).sum(2, keepdim=True),
    "other_exponent": lambda x: exponents(x) / exponents(2 * x).sum(1, keepdim=True),
    "no_keepdim": lambda x: x.flatten(1).exp() / x.flatten(1).exp().sum(1)[:, None],
    "number": lambda x: 2.0 / x.exp(),
    "no_mean": lambda x: x.sum((2, 3)) / 21,
    "no_mean_times": lambda x: x.sum((2, 3)) * 0.06,
    "by_a_tensor": lambda x: x.sum(1) / x[:, 0],
    "rows": lambda x: x.flatten(2).mean(1),
    "channels_joined": lambda x: x.flatten(1, 2).mean(-1),
    "kept_once": lambda x: x.mean(2, keepdim=True).mean(3),
    "read_twice": lambda x: (lambda m: m.mean(2) + m[..., 0])(x.mean(3)),
    "of_a_sum": lambda x: x.sum(3).mean(2),
    "halves": lambda x: x.reshape(2, 12, 10).mean(-1),
}


def captured(function, dynamic=None):
    program = torch.export.export(Call(function), (X,), dynamic_shapes=dynamic)
    return program.module(check_guards=False)


def names(gm):
    return [n.target.__name__.split(".")[0] for n in gm.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmax_when_written_out_then_the_operator_alone(name):
    gm = captured(SOFTMAXES[name])
    assert name_reductions(gm).changed
    assert "softmax" in names(gm)
    assert "exp" not in names(gm)
    torch.testing.assert_close(gm(X), X.softmax(1))


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", MEANS)
def test_mean_when_written_out_then_the_operator(name, is_dynamic):
    sizes = {0: Dim("n", max=9)}
    if name in ("flatten", "view", "sum"):
        sizes |= {2: Dim("h", max=90), 3: Dim("w", max=90)}
    gm = captured(MEANS[name], [sizes] if is_dynamic else None)
    assert name_reductions(gm).changed
    assert set(names(gm)) - {"sym_size"} <= {"mean", "unsqueeze"}
    assert names(gm).count("mean") == 1
    torch.testing.assert_close(gm(X), MEANS[name](X))


@pytest.mark.parametrize("name", OTHERS)
def test_quotient_when_it_is_neither_then_it_stays(name):
    assert not name_reductions(captured(OTHERS[name])).changed
