"""Keep ONNX Runtime from rounding the float weights of products between integers."""

import onnx_ir as ir

from pt2e_quant.backends.onnx.values import call, read_dequantize

_ROUNDED = ("Conv", "ConvTranspose", "Gemm")
"""The products whose float weights ONNX Runtime rounds."""


def keep_weights_float(graph: ir.Graph) -> int:
    """Keep the weights of products in float that are initializers; see `keep_weight_float`."""
    changed = 0
    for node in list(graph):
        if node.op_type in _ROUNDED:
            weight = node.inputs[1]
            if weight is not None and weight.is_initializer():
                changed += keep_weight_float(node)
    return changed


def keep_weight_float(product: ir.Node) -> bool:
    """Put a Sum of one tensor, which copies it, between a product in float and its quantize.

    ONNX Runtime 1.32 (WeightBiasQuantization) rounds float weights to int8 per tensor, at load,
    where the product reads a dequantize and leads to a quantize, at most through Relu and Clip.

    Before:  ConvTranspose(dq(x), w float) -> Relu -> q
    After:   ConvTranspose(dq(x), w float) -> Relu -> Sum -> q

    Returns:
        Whether there was need of one.
    """
    if product.op_type not in _ROUNDED or read_dequantize(product.inputs[0]) is None:
        return False
    output, uses = product.outputs[0], list(product.outputs[0].uses())
    while len(uses) == 1 and uses[0].node.op_type in ("Relu", "Clip"):
        output = uses[0].node.outputs[0]
        uses = list(output.uses())
    if len(uses) != 1 or uses[0].node.op_type != "QuantizeLinear":
        return False
    put_sum_behind(output)
    return True


def put_sum_behind(output: ir.Value) -> None:
    """Let all readers of a value read a copy of it."""
    node, uses = output.producer(), list(output.uses())
    assert node is not None
    kept = call(node, "Sum", [output], name=f"{output.name}_kept", like=output, after=True)
    for use in uses:
        use.node.replace_input_with(use.idx, kept)
