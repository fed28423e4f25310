"""The epilogue of a match, as the keyword arguments of a fused call."""

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from pt2e_quant.graph import ops
from pt2e_quant.graph.clamps import clamp_bounds
from pt2e_quant.graph.ops import Overloads, argument, is_call
from pt2e_quant.kernels.epilogue.epilogue import INTEGER_OUTPUTS, Activation
from pt2e_quant.kernels.quantized_values import affine_of
from pt2e_quant.kernels.site import Site

Found = tuple[Activation, tuple[float, ...]]


def _clamp(node: Node) -> Found:
    bounds = clamp_bounds(node)
    assert bounds is not None  # the op table asks for numbers
    return Activation.CLAMP, bounds


def _gelu(node: Node) -> Found:
    is_tanh = argument(node, "approximate") == "tanh"
    return (Activation.GELU_TANH if is_tanh else Activation.GELU), ()


_READERS: tuple[tuple[Overloads, Callable[[Node], Found]], ...] = (
    (ops.RELU, lambda node: (Activation.RELU, ())),
    ((*ops.RELU6, *ops.HARDTANH, *ops.CLAMP), _clamp),
    (ops.HARDSWISH, lambda node: (Activation.HARDSWISH, ())),
    (ops.SILU, lambda node: (Activation.SILU, ())),
    (ops.GELU, _gelu),
    (ops.TANH, lambda node: (Activation.TANH, ())),
    (ops.SIGMOID, lambda node: (Activation.SIGMOID, ())),
    (
        ops.LEAKY_RELU,
        lambda node: (Activation.LEAKY_RELU, (float(argument(node, "negative_slope")),)),
    ),
)

ACTIVATIONS: Overloads = tuple(member for overloads, _ in _READERS for member in overloads)
"""The activation functions that a pattern may end with."""


def activation_of(node: Node) -> Found | None:
    """The activation that a node computes, None if an epilogue has none such."""
    return next((read(node) for overloads, read in _READERS if is_call(node, overloads)), None)


def epilogue_arguments(site: Site) -> dict[str, Any]:
    """The epilogue of a match with the names b, add and y, and an activation as its anchor.

    Returns:
        Arguments of `EPILOGUE_SCHEMA`: nodes for tensors, numbers for the rest.
    """
    match = site.match
    found: dict[str, Any] = {}
    if isinstance(match.values.get("b"), Node):
        found["bias"] = site.editor.now(match.node("b"))
    if "add" in match.nodes:
        found.update(_residual(site, match.node("y")))
    return {**found, **output_arguments(site)}


def output_arguments(site: Site) -> dict[str, Any]:
    """The activation that a match ends with, its result's dtype and qparams, and its label.

    Returns:
        Arguments of `OUTPUT_SCHEMA`, and label.
    """
    found: dict[str, Any] = {}
    activation = activation_of(site.match.anchor)
    if activation is not None:
        found["activation"], found["limits"] = str(activation[0]), list(activation[1])
    found["label"] = site.label
    if site.output is None:
        value = site.match.anchor.meta["val"]
        return {**found, "out_dtype": value.dtype}
    out = site.output
    return {
        **found,
        "out_dtype": out.dtype,
        "out_scale": out.scale,
        "out_zero_point": out.zero_point,
        "out_min": out.quant_min,
        "out_max": out.quant_max,
    }


def operand_of(site: Site, node: Node) -> tuple[Node, float, int]:
    """The operand of a kernel for a value: its integers with scale and zero point, else its floats.

    Floats have the scale 1.0 and the zero point 0, which nothing reads.
    """
    affine = affine_of(node)
    source = node.args[0] if node.args else None
    if affine is None or affine.dtype not in INTEGER_OUTPUTS or not isinstance(source, Node):
        return site.editor.now(node), 1.0, 0
    return site.editor.now(source), affine.scale, affine.zero_point


def _residual(site: Site, added: Node) -> dict[str, Any]:
    tensor, scale, zero_point = operand_of(site, added)
    return {"residual": tensor, "residual_scale": scale, "residual_zero_point": zero_point}
