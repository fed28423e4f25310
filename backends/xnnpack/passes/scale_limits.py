"""The scales for which XNNPACK's integer kernels can be created and compute correctly.

XNNPACK requantizes by a ratio of scales. It refuses a ratio of 256 or more when a convolution or
linear is loaded; sums, products and leaky_relu it computes with a fixed number of bits, without a
check in a release build: beyond their bounds the results are wrong (255 steps on x86), or shifts
are undefined (on Arm). Such an operator runs in float between its dq and q, inside the delegate.

The bounds are those that XNNPACK's own sources assert (src/microparams-init.c,
src/operators/fully-connected-nc.c, src/operators/unary-elementwise-nc.c).
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.requantize_between import sole_quantize
from pt2e_quant.backends.xnnpack.passes.kernel_forms import is_static_int8, operands
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import ADDMM, HARDTANH, RELU, argument, is_call
from pt2e_quant.passes.qdq.round_biases_to_accumulator import BIAS_BELOW

_PRODUCT_BELOW = 2.0**8
_SUM = (2.0**-10, 2.0**8)
_MUL = (2.0**-16, 2.0**8)
_LEAKY_RELU_BELOW = 2.0**7
_LIMITS_FUSED = ("relu.default", "hardtanh.default")


def why_no_product(gm: GraphModule, node: Node) -> str | None:
    """Why XNNPACK cannot run a convolution or linear of static int8 for its scales; None if it can.

    Args:
        gm: the graph's module, which holds the weight's scales.
        node: one of the GEMMS.
    """
    activation, weight = operands(node)
    quantize = _quantize_behind(node)
    if quantize is None or not isinstance(activation, Node) or not isinstance(weight, Node):
        return None
    if not is_static_int8(activation) or not is_dequantize(weight):
        return None
    scale: Any = weight.args[1]
    held = constant_of(gm, scale) if isinstance(scale, Node) else torch.tensor(scale)
    if held is None:
        return None
    ratio = float(activation.args[1]) * float(held.max()) / float(quantize.args[1])  # type: ignore[arg-type]  # floats by schema
    # XNNPACK computes the ratio in float32.
    if ratio < _PRODUCT_BELOW * (1 - 1e-6):
        return _why_no_bias(gm, node, float(activation.args[1]) * held.double())  # type: ignore[arg-type]  # a float
    return (
        f"one step of its sums is {ratio:.3g} steps of its output, XNNPACK takes less than "
        f"{_PRODUCT_BELOW:.0f}"
    )


def _why_no_bias(gm: GraphModule, node: Node, steps: Tensor) -> str | None:
    """Why a bias is no int32 in the steps of a product's sums, as behind inputs that are all 0."""
    bias = argument(node, "self" if is_call(node, ADDMM) else "bias")
    value = constant_of(gm, bias) if isinstance(bias, Node) else None
    if value is None or not value.is_floating_point():
        return None
    size = value.detach().double().abs()
    most = float((size / (steps if steps.shape == size.shape else steps.min())).max())
    if most < BIAS_BELOW:
        return None
    return f"its bias is {most:.3g} steps of its sums, of which int32 holds {BIAS_BELOW:.3g}"


def why_beyond_scales(node: Node, name: str) -> str | None:
    """Why XNNPACK's integer kernel of an elementwise operator is wrong for its scales, or None.

    Args:
        node: of the edge program, or of the ATen program before it, between dq and q.
        name: the operator as ExecuTorch's partitioner names it, for example "add.Tensor".
    """
    check = _CHECKS.get(name)
    if check is None:
        return None
    inputs = [_scale(arg) for arg in node.args if isinstance(arg, Node)]
    output = _output_scale(node)
    scales = [scale for scale in inputs if scale is not None]
    if output is None or not scales or len(scales) < len(inputs):
        return None
    return check(node, scales, output)


def notes_of_scales(gm: GraphModule) -> list[str]:
    """The notes of the report on each elementwise operator that its scales keep in float."""
    found = (
        (n, why_beyond_scales(n, str(getattr(n.target, "__name__", "")))) for n in gm.graph.nodes
    )
    return [f"{node.name}: float in the delegate, {reason}" for node, reason in found if reason]


def _quantize_behind(node: Node) -> Node | None:
    users = list(node.users)
    if len(users) == 1 and is_call(users[0], (*RELU, *HARDTANH)):
        node = users[0]
    return sole_quantize(node)


def _scale(node: Node) -> float | None:
    """The scale of a static per-tensor q or dq, in either program."""
    name = str(getattr(node.target, "__name__", ""))
    value = node.args[1] if name.endswith("quantize_per_tensor.default") else None
    return float(value) if isinstance(value, (int, float)) else None


def _output_scale(node: Node) -> float | None:
    users = list(node.users)
    if len(users) == 1 and str(getattr(users[0].target, "__name__", "")).endswith(_LIMITS_FUSED):
        users = list(users[0].users)
    return _scale(users[0]) if len(users) == 1 else None


def _sum(_: Node, inputs: list[float], output: float) -> str | None:
    return _outside(max(inputs) / output, *_SUM)


def _product(node: Node, inputs: list[float], output: float) -> str | None:
    return _outside(inputs[0] * inputs[-1] / output, *_MUL)


def _leaky_relu(node: Node, inputs: list[float], output: float) -> str | None:
    slope: Any = node.args[1] if len(node.args) > 1 else 0.01
    return _outside(inputs[0] * max(1.0, abs(slope)) / output, 0.0, _LEAKY_RELU_BELOW)


def _outside(ratio: float, low: float, high: float) -> str | None:
    if low <= ratio < high:
        return None
    return f"the ratio {ratio:.3g} of its scales is not in XNNPACK's [{low:.3g}, {high:.3g})"


_CHECKS: Mapping[str, Callable[[Node, list[float], float], str | None]] = {
    "add.Tensor": _sum,
    "leaky_relu.default": _leaky_relu,
    "mul.Tensor": _product,
    "sub.Tensor": _sum,
}
