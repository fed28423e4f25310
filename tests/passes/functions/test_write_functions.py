"""Functions that a runtime lacks: written out they compute as ATen does, and only those named."""

import math

import pytest
import torch
from torch import Tensor, nn

from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.functions.table import FUNCTIONS
from pt2e_quant.passes.functions.write_functions import write_functions

X = torch.randn(64, 9, generator=torch.Generator().manual_seed(0)) * 3
X[0, :3] = torch.tensor([0.0, -0.0, 1.0])
Y = X.roll(1, 0)
WHOLE = X.round()
VOLUME, GRID = X.view(2, 2, 4, 4, 9), X[:, :3].view(2, 4, 4, 2, 3) / 2
BOUND = 5e-6
"""lgamma and digamma subtract numbers of about 20, a step of which is 2e-6 in float32."""
EXACT = {
    "aten.aminmax.default": (X,),
    "aten.as_strided_scatter.default": (X, Y[:2, :3], [2, 3], [18, 2], 4),
    "aten.index_reduce.default": (X, 0, torch.tensor([3, 3, 7]), Y[:3], "mean"),
    "aten.mvlgamma.default": (X.abs() + 2.1, 3),
    "aten.narrow_copy.default": (X, -1, 2, 4),
    "aten.cdist.default": (X, Y, 3.0),
    "aten.pdist.default": (X, 2.0),
    "aten._pdist_forward.default": (X[:7], 1.0),
    "aten.masked_select.default": (X, X[0] > 0),
    "aten.pad.default": (X.view(2, 4, 8, 9), [-9, 2, 3, -1], "replicate"),
    "aten.soft_margin_loss.default": (40 * X.abs(), X.abs(), 0),
    "aten.angle.default": (X,),
    "aten.atan2.default": (X, Y),
    "aten._upsample_bicubic2d_aa.default": (X.view(1, 2, 32, 9), [9, 20], True, None, None),
    "aten._upsample_bicubic2d_aa.vec": (X.view(1, 2, 32, 9), [9, 20], False, None),
    "aten._upsample_bilinear2d_aa.default": (X.view(1, 2, 32, 9), [16, 4], False, 0.5, 0.5),
    "aten._upsample_bilinear2d_aa.vec": (X.view(1, 2, 32, 9), None, False, [0.3, 1.7]),
    "aten._trilinear.default": (
        WHOLE,
        WHOLE[:45].view(5, 9, 9),
        WHOLE,
        [1, 3],
        [0],
        [1, 2],
        [2, 3],
    ),
    "aten.conv_transpose1d.default": (
        X[:6].view(1, 6, 9),
        X[:6, :8].view(6, 2, 4),
        X[0, :2],
        [1],
        [1],
        [2],
        1,
        [3],
    ),
    "aten.conv_transpose2d.input": (
        X.view(2, 4, 8, 9),
        X[:8].view(4, 3, 2, 3),
        None,
        [2, 1],
        [0, 2],
        [1, 1],
        2,
        [1, 2],
    ),
    "aten.conv_transpose3d.input": (
        X.view(1, 2, 4, 8, 9),
        X[:4, :8].view(2, 2, 2, 2, 2),
        X[0, :2],
        [1],
        [0],
        [1],
        1,
        [2],
    ),
    "aten.celu.default": (X, 1.3),
    "aten.clamp.default": (X, 0, 1.5),
    "aten.copysign.Tensor": (X, Y.double()),
    "aten.cummax.default": (X, 1),
    "aten.cummin.default": (X, 1),
    "aten.cumprod.default": (X, 1),
    "aten.elu.default": (X, 0.7, 1.1, 0.9),
    "aten.selu.default": (X,),
    "aten.digamma.default": (torch.linspace(0.1, 20, 500),),
    "aten.erfc.default": (torch.linspace(-3, 5, 500),),
    "aten.erfinv.default": (torch.linspace(-1, 1, 501),),
    "aten.exp2.default": (X,),
    "aten.expm1.default": (torch.cat([X, X * 1e-6]),),
    "aten.fmax.default": (X, Y),
    "aten.fmin.default": (X, Y),
    "aten.grid_sampler_3d.default": (VOLUME, GRID, 0, 0, False),
    "aten.hypot.default": (X, Y),
    "aten.i0.default": (X,),
    "aten.index_put.default": (
        X.view(8, 8, 9),
        [torch.tensor([[0], [-1]]), torch.tensor([2, 2, -3])],
        X[0],
        True,
    ),
    "aten.lgamma.default": (torch.linspace(0.1, 20, 500),),
    "aten.log_sigmoid.default": (torch.linspace(-200, 200, 500),),
    "aten.logaddexp.default": (100 * X, Y),
    "aten.logaddexp2.default": (100 * X, Y),
    "aten.special_log_ndtr.default": (torch.linspace(-50, 6, 500),),
    "aten.binary_cross_entropy_with_logits.default": (100 * X, Y.sigmoid(), None, None, 0),
    "aten._is_all_true.default": (X > 0,),
    "aten._is_any_true.default": (X > 0,),
    "aten.histc.default": (WHOLE, 7, -3, 3),
    "aten.logcumsumexp.default": (X, 1),
    "aten.median.default": (torch.where(X > 5, math.nan, X),),
    "aten.median.dim": (X, 1),
    "aten.put.default": (X, torch.tensor([3, 7]), torch.tensor([1.0, 2.0]), True),
    "aten.remainder.Scalar": (WHOLE.long(), -5),
    "aten.remainder.Tensor": (WHOLE.int(), WHOLE.abs().int() + 2),
    "aten.rrelu.default": (X, 0.1, 0.5),
    "aten.signbit.default": (X,),
    "aten.special_erfcx.default": (torch.linspace(-3, 12, 500),),
    "aten.special_i1e.default": (X,),
}


def test_distances_when_there_is_one_row_then_none():
    assert FUNCTIONS["aten.pdist.default"](X[:1], 2.0).shape == (0,)


PRODUCTS = {
    "addbmm": (WHOLE[:4, :5], WHOLE[:12].view(3, 4, 9), WHOLE[:15].view(3, 5, 9).mT),
    "addmv": (WHOLE[0, :1], WHOLE, WHOLE[1]),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 3), (0, 1)])
def test_product_when_added_to_another_then_as_aten(name, beta, alpha):
    x, left, right = PRODUCTS[name]
    x = x * math.nan if beta == 0 else x  # which torch leaves out
    found = FUNCTIONS[f"aten.{name}.default"](x, left, right, beta=beta, alpha=alpha)
    wanted = getattr(torch, name)(x, left, right, beta=beta, alpha=alpha)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", EXACT)
def test_function_when_written_out_then_as_near_as_float32_is(name):
    args = EXACT[name]
    wide = [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in args]
    wanted, found = eval(f"torch.ops.{name}", {"torch": torch})(*wide), FUNCTIONS[name](*args)
    pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    for left, right in pairs:
        torch.testing.assert_close(
            left.double(), right.double(), rtol=2e-6, atol=BOUND, equal_nan=True
        )


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("align", [False, True])
def test_samples_of_volumes_when_written_out_then_as_aten(mode, padding, align):
    args = VOLUME, GRID, mode, padding, align
    found = FUNCTIONS["aten.grid_sampler_3d.default"](*args)
    torch.testing.assert_close(found, torch.ops.aten.grid_sampler_3d(*args))


@pytest.mark.parametrize("name", ["elu", "celu", "selu"])
def test_elu_when_its_values_are_little_then_their_bits_are_kept(name):
    x = -1e-8 * torch.rand(64)
    found = FUNCTIONS[f"aten.{name}.default"](x)
    torch.testing.assert_close(found, getattr(torch.nn.functional, name)(x), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("values", [X.round(), X.round().int()], ids=["floats", "integers"])
def test_mode_when_written_out_then_the_least_of_the_most_frequent(values):
    (found,) = FUNCTIONS["aten.mode.default"](values, 1, keepdim=True)
    torch.testing.assert_close(found, values.mode(1, keepdim=True).values)


@pytest.mark.parametrize("offset", [-2, 0, 1, 8])
@pytest.mark.parametrize("dims", [(0, 1), (2, -3)])
def test_diagonal_when_written_then_as_aten(offset, dims):
    x = X[:60].view(6, 10, 9)
    source = torch.ones_like(torch.diagonal(x, offset, *dims))
    found = FUNCTIONS["aten.diagonal_scatter.default"](x, source, offset, *dims)
    torch.testing.assert_close(found, torch.diagonal_scatter(x, source, offset, *dims))


@pytest.mark.filterwarnings("ignore:The reduce argument")
@pytest.mark.parametrize("reduce", ["add", "multiply"])
@pytest.mark.parametrize("source", [Y, 2.5], ids=["tensor", "number"])
def test_scatter_when_it_reduces_then_as_aten(reduce, source):
    index = WHOLE[:, :9].abs().long() % 9
    form = "reduce" if source is Y else "value_reduce"
    found = FUNCTIONS[f"aten.scatter.{form}"](X, 1, index, source, reduce=reduce)
    torch.testing.assert_close(found, torch.scatter(X, 1, index, source, reduce=reduce))


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weight", [None, X[1].abs()])
@pytest.mark.parametrize("shape", [(64, 9), (9,), (8, 9, 2, 4)])
def test_cross_entropy_when_labels_are_smoothed_or_shares_then_as_aten(shape, weight, reduction):
    x = X.view(-1)[: math.prod(shape)].view(shape)
    target = (
        torch.arange(math.prod(shape) // 9).view(shape[:1] + shape[2:] if shape[1:] else ()) % 9
    )
    shares = x.roll(1, 0).softmax(min(len(shape) - 1, 1))
    for given, smoothing in ((target, 0.1), (shares, 0.1), (shares, 0.0)):
        args = x, given, weight, reduction, 3 if given is target else -100, smoothing
        found = FUNCTIONS["aten.cross_entropy_loss.default"](*args)
        torch.testing.assert_close(found, torch.ops.aten.cross_entropy_loss(*args))


def _graph(forward):
    class Model(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return forward(x, y)

    return torch.export.export(Model(), (X, Y)).module(check_guards=False)


def _calls(gm):
    return {str(node.target) for node in gm.graph.nodes if node.op == "call_function"}


def test_write_functions_when_a_runtime_lacks_one_then_it_alone_is_written():
    gm = _graph(lambda x, y: torch.hypot(x, y) + torch.fmax(x, y))
    run_passes(gm, (write_functions(["aten.fmax.default"]),), verify=True, sample=((X, Y), {}))
    assert "aten.hypot.default" not in _calls(gm)
    assert {"aten.maximum.default", "aten.fmax.default"} <= _calls(gm)
    assert not run_passes(gm, (write_functions(["aten.fmax.default"]),))[0].changed


def test_write_functions_when_a_function_cannot_be_written_then_left():
    gm = _graph(lambda x, y: torch.rrelu(x, 0.1, 0.5, True) + torch.hypot(x.double(), y))
    assert run_passes(gm, (write_functions([]),))[0].changed
    assert "aten.rrelu.default" in _calls(gm)


def test_write_functions_when_two_inputs_share_a_value_in_metadata_then_both_are_read():
    gm = _graph(lambda x, y: torch.hypot(x.clamp(max=0.5), x) + y)
    (clamp,) = (n for n in gm.graph.nodes if "clamp" in str(n.target))
    clamp.meta["val"] = clamp.args[0].meta["val"]
    expected = gm(X, Y)
    run_passes(gm, (write_functions(()),))
    torch.testing.assert_close(gm(X, Y), expected)


class Counted(nn.Module):
    """A number that is read from a tensor, in front of a function."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.logaddexp(x, x + x.max().item())


def test_write_when_a_number_of_another_trace_was_thrown_away_then_written():
    gm = torch.export.export(Counted(), (X,)).module()
    mode = next(n.meta["val"] for n in gm.graph.nodes if "val" in n.meta).fake_mode
    mode.shape_env.create_unbacked_symint()  # as passes of ExecuTorch leave them
    expected = gm(X)
    run_passes(gm, (write_functions(()),))
    assert "aten.logaddexp.default" not in {str(n.target) for n in gm.graph.nodes}
    torch.testing.assert_close(gm(X), expected, atol=BOUND, rtol=BOUND)
