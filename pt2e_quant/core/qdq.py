"""The q/dq operators of the canonical form: which they are, and how to read one.

They are torch's own `quantized_decomposed` library, because ExecuTorch's and onnxscript's tools
read exactly these. The library is registered by importing torch's module, never defined here.
What it cannot say is in operators of our own, see `core.format_ops`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

# Registers the quantized_decomposed library; nothing of the module is used.
import torch.ao.quantization.fx._decomposed
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import InvariantError
from pt2e_quant.core.formats import format_ops
from pt2e_quant.core.qparams import QParams
from pt2e_quant.core.unpack_op import Unpack, is_unpack

FLOAT_NAME_KEY = "pt2e_quant.float_name"
"""Key of a `get_attr` node's `meta`: the dotted name of the float constant that its integers are
of. The passes that store integers, or store them otherwise, write it."""

_lib = torch.ops.quantized_decomposed

QuantizePerTensor = _lib.quantize_per_tensor.default
DequantizePerTensor = _lib.dequantize_per_tensor.default
QuantizePerTensorDynamic = _lib.quantize_per_tensor.tensor
DequantizePerTensorDynamic = _lib.dequantize_per_tensor.tensor
QuantizePerChannel = _lib.quantize_per_channel.default
DequantizePerChannel = _lib.dequantize_per_channel.default
QuantizePerGroup = _lib.quantize_per_channel_group.default
DequantizePerGroup = _lib.dequantize_per_channel_group.default
QuantizePerToken = _lib.quantize_per_token.default
DequantizePerToken = _lib.dequantize_per_token.default
ChoosePerTensor = _lib.choose_qparams.tensor
ChoosePerTensorSymmetric = _lib.choose_qparams_symmetric.tensor
ChoosePerToken = _lib.choose_qparams_per_token_asymmetric.default


class QdqKind(StrEnum):
    """The granularity of the scales of a q/dq op."""

    PER_TENSOR = "per_tensor"
    PER_TENSOR_DYNAMIC = "per_tensor_dynamic"
    PER_CHANNEL = "per_channel"
    PER_CHANNEL_GROUP = "per_channel_group"
    PER_TOKEN = "per_token"
    BLOCK = "block"
    FLOAT = "float"
    CODE_BOOK = "code_book"


QUANTIZE_OPS = {
    _lib.quantize_per_tensor.default: QdqKind.PER_TENSOR,
    QuantizePerTensorDynamic: QdqKind.PER_TENSOR_DYNAMIC,
    _lib.quantize_per_tensor.tensor2: QdqKind.PER_TENSOR_DYNAMIC,
    _lib.quantize_per_channel.default: QdqKind.PER_CHANNEL,
    _lib.quantize_per_channel_group.default: QdqKind.PER_CHANNEL_GROUP,
    _lib.quantize_per_token.default: QdqKind.PER_TOKEN,
    format_ops.QuantizeBlock: QdqKind.BLOCK,
    format_ops.QuantizeFloat: QdqKind.FLOAT,
    format_ops.QuantizeCodeBook: QdqKind.CODE_BOOK,
}
DEQUANTIZE_OPS = {
    _lib.dequantize_per_tensor.default: QdqKind.PER_TENSOR,
    DequantizePerTensorDynamic: QdqKind.PER_TENSOR_DYNAMIC,
    _lib.dequantize_per_tensor.tensor2: QdqKind.PER_TENSOR_DYNAMIC,
    _lib.dequantize_per_channel.default: QdqKind.PER_CHANNEL,
    _lib.dequantize_per_channel_group.default: QdqKind.PER_CHANNEL_GROUP,
    _lib.dequantize_per_token.default: QdqKind.PER_TOKEN,
    format_ops.DequantizeBlock: QdqKind.BLOCK,
    format_ops.DequantizeFloat: QdqKind.FLOAT,
    format_ops.DequantizeCodeBook: QdqKind.CODE_BOOK,
}
OWN_KINDS = frozenset({QdqKind.BLOCK, QdqKind.FLOAT, QdqKind.CODE_BOOK})
"""The layouts of our own operators, that quantized_decomposed cannot say."""
QDQ_OPS = QUANTIZE_OPS | DEQUANTIZE_OPS

# Asked of every node many times over: an overload's hash is a Python call, its id is not.
_QUANTIZE_IDS = frozenset(map(id, QUANTIZE_OPS))
_DEQUANTIZE_IDS = frozenset(map(id, DEQUANTIZE_OPS))
_KINDS = {id(op): kind for op, kind in QDQ_OPS.items()}

CHOOSE_QPARAMS_OPS = frozenset(
    {
        ChoosePerTensor,
        ChoosePerTensorSymmetric,
        ChoosePerToken,
        format_ops.ChooseScales,
    }
)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Positions of the constant qparams among a q/dq op's arguments."""

    axis: int | None
    quant_min: int
    quant_max: int
    dtype: int
    group_size: int | None = None


_LAYOUTS = {
    QdqKind.PER_TENSOR: _Layout(axis=None, quant_min=3, quant_max=4, dtype=5),
    QdqKind.PER_CHANNEL: _Layout(axis=3, quant_min=4, quant_max=5, dtype=6),
    QdqKind.PER_CHANNEL_GROUP: _Layout(axis=None, quant_min=3, quant_max=4, dtype=5, group_size=6),
}


STATIC_KINDS = frozenset(_LAYOUTS)
"""The layouts whose qparams `read_qparams` can read."""


def is_quantize(node: Node) -> bool:
    """True if a node is a quantize op of the canonical form."""
    return id(node.target) in _QUANTIZE_IDS


def is_dequantize(node: Node) -> bool:
    """True if a node is a dequantize op of the canonical form."""
    return id(node.target) in _DEQUANTIZE_IDS


def is_qdq(node: Node) -> bool:
    """True if a node is a quantize or dequantize op of the canonical form."""
    return id(node.target) in _KINDS


def kind_of_qdq(node: Node) -> QdqKind | None:
    """The layout of a q/dq node's scales, None for any other node."""
    return _KINDS.get(id(node.target))


def float_name(node: Node) -> str:
    """The dotted name of the float constant whose integers a `get_attr` node reads.

    Its own name where no pass of this package stored it.
    """
    return str(node.meta.get(FLOAT_NAME_KEY, node.target))


def required_attribute(gm: GraphModule, name: str) -> Any:
    """The object a dotted get_attr target names.

    Raises:
        AttributeError: there is none.
    """
    found: Any = gm
    for part in name.split("."):
        found = getattr(found, part)
    return found


def read_qparams(gm: GraphModule, node: Node) -> QParams:
    """The qparams of a q/dq node with constant ones: per tensor, channel or group.

    Raises:
        InvariantError: the node has none that are constant.
    """
    kind = kind_of_qdq(node)
    layout = _LAYOUTS.get(kind) if kind is not None else None
    if layout is None:
        raise InvariantError("this node has no constant qparams", node=node)
    args = node.args
    scale = _constant(gm, node, args[1]).to(torch.float32)
    zero_point = _constant(gm, node, args[2])
    group_size = None if layout.group_size is None else int(args[layout.group_size])  # type: ignore[arg-type]
    return QParams(
        scale=scale,
        zero_point=zero_point.to(torch.float32 if zero_point.is_floating_point() else torch.int32),
        quant_min=int(args[layout.quant_min]),  # type: ignore[arg-type]  # literals by schema
        quant_max=int(args[layout.quant_max]),  # type: ignore[arg-type]
        dtype=args[layout.dtype],  # type: ignore[arg-type]
        axis=None if layout.axis is None else int(args[layout.axis]),  # type: ignore[arg-type]
        group_size=group_size,
    )


def _constant(gm: GraphModule, node: Node, value: object) -> Tensor:
    if isinstance(value, Node):
        if is_unpack(value):
            packed, *layout = value.args
            return Unpack(_constant(gm, node, packed), *layout, **value.kwargs)  # type: ignore[no-any-return]
        if value.op != "get_attr":
            raise InvariantError("the qparams of this node are computed at run time", node=node)
        value = required_attribute(gm, str(value.target))
    return torch.as_tensor(value)
