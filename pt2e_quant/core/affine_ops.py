"""torchao's affine q/dq operators, known by name: granularities that quantized_decomposed lacks.

torchao defines and registers them; it need not be installed to ask.
"""

from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node


def is_affine_quantize(node: Node) -> bool:
    """True if a node calls torchao::quantize_affine."""
    return _name(node) == "torchao::quantize_affine"


def _name(node: Node) -> str:
    target = node.target
    if isinstance(target, OpOverloadPacket):  # as torchao's own observers write it
        return str(target._qualified_op_name)
    return str(target._schema.name) if isinstance(target, OpOverload) else ""
