"""Float functions that ExecuTorch computes element by element run inside of the delegate."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from pt2e_quant.backends.xnnpack.passes.delegated_functions import functions_in_delegate
from pt2e_quant.graph.pipeline import run_passes
from tests.backends.call_saved import call_pte, pte_of_batches
from tests.call_function import Call

FUNCTIONS = {
    "softplus": F.softplus,
    "softplus_of_a_slope": lambda x: F.softplus(x, beta=2.0),
    "mish": F.mish,
    "log_sigmoid": F.logsigmoid,
    "celu": lambda x: F.celu(x, 0.5),
    "selu": F.selu,
    "cube": lambda x: x**3,
    "fourth_power": lambda x: x**4,
    "root": lambda x: x.abs() ** 0.5,
    "root_of_reciprocal": lambda x: (x.abs() + 0.1) ** -0.5,
    "reciprocal": lambda x: (x.abs() + 0.1).reciprocal(),
    "softmax_of_channels": lambda x: x.softmax(1),
    "log_softmax_of_channels": lambda x: x.log_softmax(1),
    "log_softmax_of_rows": lambda x: x.log_softmax(-1),
    "normalized_channels": lambda x: F.normalize(x, dim=1),
    "normalized_rows": lambda x: F.normalize(x, dim=-1),
    "rolled": lambda x: x.roll((2, -3), (2, 3)),
    "bicubic": lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
    "bicubic_corners": lambda x: F.interpolate(x, (5, 17), mode="bicubic", align_corners=True),
    "bicubic_scales": lambda x: F.interpolate(x, scale_factor=(1.3, 0.7), mode="bicubic"),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
}
OUTSIDE = {"aten::sum.IntList_out", "aten::slice_copy.Tensor_out"}
"""The delegate has no sum, and slices at one batch alone."""


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


class Functions(nn.Module):
    """Every function of what a convolution gives."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)

    def forward(self, x):
        y = self.conv(x)
        return [y, *(function(y) for function in FUNCTIONS.values())]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_when_written_for_the_delegate_then_equal_to_rounding(name):
    x = noise(2, 3, 7, 9)
    gm = torch.export.export(Call(FUNCTIONS[name]), (x,)).module()
    assert run_passes(gm, (functions_in_delegate,))[0].changed
    torch.testing.assert_close(gm(x), FUNCTIONS[name](x), rtol=3e-6, atol=3e-6)


def test_softplus_when_small_then_its_bits_are_kept():
    x = torch.linspace(-30.0, 30.0, 10_001)
    gm = torch.export.export(Call(F.softplus), (x,)).module()
    run_passes(gm, (functions_in_delegate,))
    torch.testing.assert_close(gm(x), F.softplus(x, threshold=100), rtol=1e-6, atol=0)


def test_log_softmax_when_values_are_hidden_far_or_large_then_precise():
    x = noise(4, 9)
    x[0, 2:] = -torch.inf
    x[1] += 1e4
    x[2, 3] = 300.0
    gm = torch.export.export(Call(lambda x: x.log_softmax(-1)), (x,)).module()
    run_passes(gm, (functions_in_delegate,))
    exact = x.double().log_softmax(-1).float()
    torch.testing.assert_close(gm(x), exact, rtol=1e-5, atol=2e-3)
    torch.testing.assert_close(gm(x)[2:], exact[2:], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.softplus(x, threshold=2.0),
        lambda x: x**5,
        lambda x: torch.linalg.vector_norm(x, 3, dim=1),
        lambda x: x.softmax(-1),
        lambda x: x.double().softmax(1),
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: x.roll(3),
    ],
    ids=["threshold", "power", "norm", "rows", "float64", "mean", "flat"],
)
def test_function_when_the_form_would_differ_then_left(function):
    gm = torch.export.export(Call(function), (noise(2, 3, 7, 9),)).module()
    assert not run_passes(gm, (functions_in_delegate,))[0].changed


def test_resize_when_its_size_is_dynamic_then_a_convolution():
    height, width = Dim("height", min=2, max=40), Dim("width", min=2, max=40)
    call, sizes = Call(FUNCTIONS["bicubic"]), ({2: height, 3: width},)
    gm = torch.export.export(call, (noise(2, 3, 7, 9),), dynamic_shapes=sizes).module()
    assert run_passes(gm, (functions_in_delegate,))[0].changed
    assert any(n.target is torch.ops.aten.conv2d.default for n in gm.graph.nodes)
    for shape in ((7, 9), (2, 40), (33, 5)):
        x = noise(2, 3, *shape)
        torch.testing.assert_close(gm(x), FUNCTIONS["bicubic"](x), rtol=3e-6, atol=3e-6)


def test_resize_when_its_matrices_are_large_then_left():
    x = torch.zeros(1, 1, 2, 800)
    resize = Call(lambda x: F.interpolate(x, (3, 1500), mode="bicubic"))
    gm = torch.export.export(resize, (x,)).module()
    record = run_passes(gm, (functions_in_delegate,))[0]
    assert [note.text for note in record.notes] == ["its matrices are large"]


@pytest.mark.slow
def test_functions_when_lowered_then_in_the_delegate_at_each_batch(tmp_path):
    torch.manual_seed(0)
    model = Functions().eval()
    data = [(noise(2, 3, 7, 9, seed=seed),) for seed in range(2)]
    artifact = pte_of_batches(model, data)
    assert artifact.contents().overloads <= OUTSIDE | _bookkeeping(artifact)
    calls = [(noise(n, 3, 7, 9, seed=n),) for n in (1, 5, 2)]
    again = call_pte(artifact, calls, tmp_path)
    for x, elsewhere in zip(calls, again, strict=True):
        y, *found = artifact.run(*x)
        torch.testing.assert_close(elsewhere, [y, *found], rtol=0, atol=0)
        for (name, function), made in zip(FUNCTIONS.items(), found, strict=True):
            torch.testing.assert_close(made, function(y), rtol=2e-5, atol=2e-5, msg=name)


def _bookkeeping(artifact):
    """Copies into another order of dimensions."""
    return {name for name in artifact.contents().overloads if name.startswith("dim_order_ops")}
