"""Graphs of the CPU quantizer through torchao's Inductor passes: the operators X86's reaches."""

import copy
import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.parameters import named_subset

pytest.importorskip("torchao")

pytestmark = pytest.mark.usefixtures("unmeasured")


class Fn(nn.Module):
    """A function over named modules."""

    def __init__(self, fn, **modules) -> None:
        super().__init__()
        self.fn = fn
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.fn(self, x)


def conv(i=8, o=8, k=3, **kwargs):
    return nn.Conv2d(i, o, k, padding=k // 2, **kwargs)


def residual(m, x):
    y = torch.relu(m.a(x))
    return m.d(torch.relu(m.c(torch.relu(m.b(y))) + y))


def downsample(m, x):
    y = torch.relu(m.a(x))
    return m.d(torch.relu(m.b(y) + m.c(y)))


def block(m, x):
    y = m.a(x)
    return m.d(m.c(F.gelu(m.b(y))) + y)


IMAGE, ROWS = (2, 8, 8, 8), (4, 16)
MODELS = {
    "conv_relu": (lambda: nn.Sequential(conv(), nn.ReLU(), conv()), IMAGE),
    "conv_relu6": (lambda: nn.Sequential(conv(), nn.ReLU6(), conv()), IMAGE),
    "conv_hardtanh": (lambda: nn.Sequential(conv(), nn.Hardtanh(), conv()), IMAGE),
    "conv_hardswish": (lambda: nn.Sequential(conv(), nn.Hardswish(), conv()), IMAGE),
    "conv_silu": (lambda: nn.Sequential(conv(), nn.SiLU(), conv()), IMAGE),
    "conv_bn_relu": (
        lambda: nn.Sequential(conv(bias=False), nn.BatchNorm2d(8), nn.ReLU(), conv()),
        IMAGE,
    ),
    "depthwise": (lambda: nn.Sequential(conv(groups=8), nn.ReLU(), conv(k=1)), IMAGE),
    "strided": (lambda: nn.Sequential(conv(stride=2), nn.ReLU(), conv(groups=2)), IMAGE),
    "residual": (lambda: Fn(residual, a=conv(), b=conv(), c=conv(), d=conv()), IMAGE),
    "downsample": (lambda: Fn(downsample, a=conv(), b=conv(), c=conv(k=1), d=conv()), IMAGE),
    "linear_relu": (lambda: nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4)), ROWS),
    "linear_gelu": (lambda: nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4)), ROWS),
    "linear_gelu_tanh": (
        lambda: nn.Sequential(nn.Linear(16, 8), nn.GELU("tanh"), nn.Linear(8, 4)),
        ROWS,
    ),
    "linear_without_bias": (
        lambda: nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 4, bias=False)),
        ROWS,
    ),
    "block": (
        lambda: Fn(
            block,
            a=nn.Linear(16, 8),
            b=nn.Linear(8, 32),
            c=nn.Linear(32, 8),
            d=nn.Linear(8, 4),
        ),
        ROWS,
    ),
}


def onednn_calls(gm):
    return Counter(str(n.target) for n in gm.graph.nodes if str(n.target).startswith("onednn."))


def x86_quantizer():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86
    return x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())


def lowered(gm, inputs):
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        from torchao.quantization.pt2e.lowering import lower_pt2e_quantized_to_x86

        return lower_pt2e_quantized_to_x86(gm, inputs)


@pytest.mark.filterwarnings("ignore")  # torchao's own modules, at import
@pytest.mark.parametrize(
    "name", named_subset(MODELS, "conv_relu", "depthwise", "residual", "linear_gelu")
)
def test_graph_when_lowered_by_torchao_then_the_operators_that_x86_reaches(
    quantize_with, make_noise, name
):
    make, shape = MODELS[name]
    model, inputs = make().eval(), (make_noise(*shape),)
    theirs = quantize_with(copy.deepcopy(model), inputs, x86_quantizer())
    ours = quantize_with(model, inputs)
    fused = lowered(ours, inputs)
    expected = onednn_calls(lowered(theirs, inputs))
    assert onednn_calls(fused) == expected
    assert expected.total() >= 1
    with torch.no_grad():
        wanted, found = ours(*inputs), fused(*inputs)
    # Float results of exact integer sums: only the order of the float epilogue differs.
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def pooled_and_joined(m, x):
    y = F.max_pool2d(torch.relu(m.a(x)), 2)
    y = torch.relu(m.b(y) + y)
    return m.d(torch.cat([torch.relu(m.c(y)), y], 1).flatten(1))


# The second one's linears have three axes, which torchao's lowering without code generation skips.
COMPILED = {
    "pooled_and_joined": (
        lambda: Fn(pooled_and_joined, a=conv(), b=conv(), c=conv(k=1), d=nn.Linear(256, 4)),
        IMAGE,
        {"qconv_weight_prepack_matcher_count": 3, "qlinear_weight_prepack_matcher_count": 1},
    ),
    "block_of_3_axes": (
        lambda: MODELS["block"][0](),
        (2, 3, 16),
        {"qlinear_weight_prepack_matcher_count": 4},
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow  # compiles C++
@pytest.mark.parametrize("name", COMPILED)
def test_graph_when_compiled_by_inductor_then_fused_and_equal(quantize_with, make_noise, name):
    from torch._dynamo.utils import counters
    from torch._inductor import config

    make, shape, least = COMPILED[name]
    model, inputs = make().eval(), (make_noise(*shape),)
    found = {}
    for flow, quantizer in (("ours", None), ("x86", x86_quantizer())):
        gm = quantize_with(copy.deepcopy(model), inputs, quantizer)
        torch._dynamo.reset()
        counters.clear()
        with config.patch(freezing=True, fx_graph_cache=False), torch.no_grad():
            result = torch.compile(gm)(*inputs)
            # A requantization on another side of a tie: one step of the last linear's input.
            torch.testing.assert_close(result, gm(*inputs), rtol=1e-3, atol=1e-3)
        found[flow] = Counter(
            {k: v for k, v in counters["inductor"].items() if k.startswith("q") and "count" in k}
        )
    assert found["ours"] & Counter(least) == Counter(least)
    assert not found["x86"] - found["ours"]
