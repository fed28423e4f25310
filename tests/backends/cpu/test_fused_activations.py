"""Functions behind a product: oneDNN fuses some behind a linear, fewer behind a convolution.

What it does not know it ignores or refuses, by operator: those must run behind the product.
"""

import pytest
import torch
from torch import Tensor, fx, nn

from pt2e_quant.backends.cpu.backend import BACKEND
from pt2e_quant.backends.cpu.lower import lower_graph

pytestmark = pytest.mark.usefixtures("unmeasured")

FUNCTIONS = {
    "none": nn.Identity,
    "aten.sigmoid": nn.Sigmoid,
    "aten.tanh": nn.Tanh,
    "aten.gelu": nn.GELU,
    "aten.leaky_relu": lambda: nn.LeakyReLU(0.1),
    "aten.elu": nn.ELU,
    "aten.softplus": nn.Softplus,
    "aten.prelu": nn.PReLU,
    "aten.silu": nn.SiLU,
    "aten.hardswish": nn.Hardswish,
    "aten.hardtanh": lambda: nn.Hardtanh(-0.3, 0.7),
    "aten.relu": nn.ReLU,
}
PRODUCTS = {
    "linear": (nn.Linear, (8, 16), (16, 32), (4, 8)),
    "conv2d": (nn.Conv2d, (3, 16, 3), (16, 32, 1), (2, 3, 8, 8)),
    "conv1d": (nn.Conv1d, (3, 16, 3), (16, 32, 1), (2, 3, 8)),
}
CLIPPED = {"none", "aten.relu", "aten.hardtanh", "aten.silu", "aten.hardswish"}
FUSED = {
    "linear": CLIPPED | {"aten.gelu", "aten.tanh", "aten.leaky_relu"},
    "conv2d": CLIPPED,
    "conv1d": {"none", "aten.relu"},
}


class LastProduct(fx.Interpreter):
    """Keeps the weight of the last product and the scale of the tensor it reads."""

    weight: Tensor
    step: float

    def run_node(self, n):
        target = str(n.target)
        if target.startswith(("aten.linear.", "aten.conv")):
            read, weight = n.args[:2]
            assert str(read.target).startswith("quantized_decomposed.dequantize_per_tensor.")
            self.weight, self.step = self.env[weight], float(read.args[1])
        return super().run_node(n)


def assert_equal_but_for_ties(gm, found, x):
    """Equal to float32's rounding, but for codes between the products that lie on a tie.

    Such a code is off by one where the sum before it rounds to the other side: the outputs at
    its position are off by a step times its column of the weight.
    """
    graph = LastProduct(gm)
    error = (found - graph.run(x)).transpose(0, 1).flatten(1)
    moved = error.abs().amax(0) > 1e-5
    assert moved.sum() <= max(1, moved.numel() // 50)
    for at_position in error[:, moved].T:
        off = at_position[:, None].abs() - graph.step * graph.weight.flatten(1).abs()
        assert off.abs().amax(0).min() < 1e-5


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("recipe", ["int8", "int8_reduced"])
def test_function_when_not_a_post_op_then_behind_the_product(
    quantize_with, make_noise, product, name, recipe
):
    make, first, last, shape = PRODUCTS[product]
    model = nn.Sequential(make(*first), FUNCTIONS[name](), make(*last))
    x = make_noise(*shape)
    gm = quantize_with(model, (x,), BACKEND.quantizer(recipe))
    program = lower_graph(gm)
    called = [str(n.target) for n in program.graph.nodes]
    assert sum("qlinear_pointwise" in c or "qconv_pointwise" in c for c in called) == 2
    behind = name not in FUSED[product]
    assert any(c.startswith(f"{name}.") for c in called) is behind
    with torch.no_grad():
        assert_equal_but_for_ties(gm, program(x), x)
