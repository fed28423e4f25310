"""Qparams for blocks of any shape, as torchao's affine primitives choose and apply them."""

import operator
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.dtypes import DTYPES, info
from pt2e_quant.core.errors import ConfigError, MissingExtraError

__all__ = [
    "MappingType",
    "TorchAODType",
    "ZeroPointDomain",
    "block_view",
    "choose_affine_qparams",
    "fake_quantize_affine",
    "insert_affine_qdq",
    "integer_range",
]


class _EqualByName(Enum):
    """An enum whose members equal those of torchao's enum of the same name."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Enum):
            return NotImplemented
        return (type(other).__name__, other.name) == (type(self).__name__, self.name)

    def __hash__(self) -> int:
        return hash(self.name)


class MappingType(_EqualByName):
    """The mapping of a range of real values to integers."""

    SYMMETRIC = auto()
    SYMMETRIC_NO_CLIPPING_ERR = auto()
    """Symmetric, the scale the greater of low / quant_min and high / quant_max."""

    ASYMMETRIC = auto()


class ZeroPointDomain(_EqualByName):
    """The kind of a zero_point: an integer, a real value (of the middle integer), or none."""

    INT = auto()
    FLOAT = auto()
    NONE = auto()


class TorchAODType(Enum):
    """Names of sub-byte dtypes from before torch had them; use torch.int1 .. torch.int7."""

    INT1 = auto()
    INT2 = auto()
    INT3 = auto()
    INT4 = auto()
    INT5 = auto()
    INT6 = auto()
    INT7 = auto()


def integer_range(
    dtype: torch.dtype, quant_min: int | None, quant_max: int | None
) -> tuple[int, int]:
    """The range given, or the dtype's own where it is None.

    Raises:
        ConfigError: it does not fit in the dtype.
    """
    limits = info(dtype)
    low = limits.quant_min if quant_min is None else quant_min
    high = limits.quant_max if quant_max is None else quant_max
    if not limits.holds(low, high):
        raise ConfigError(f"quant_min {low} .. quant_max {high} is no range within {dtype}")
    return low, high


def block_view(x: Tensor, block_size: tuple[int, ...]) -> tuple[Tensor, list[int], list[int]]:
    """A view in which the axes within a block are apart from the axes over blocks.

    Returns:
        The view, the axes within blocks, and its shape with those axes reduced to 1.
    """
    shape: list[int] = []
    within: list[int] = []
    for size, block in zip(x.shape, block_size, strict=True):
        if block not in (1, size):
            shape += [size // block, block]
            within.append(len(shape) - 1)
        else:
            shape.append(size)
            if block != 1:
                within.append(len(shape) - 1)
    reduced = [1 if i in within else size for i, size in enumerate(shape)]
    return x.reshape(shape), within, reduced


def choose_affine_qparams(
    min_val: Tensor,
    max_val: Tensor,
    mapping: str,
    *,
    quant_min: int,
    quant_max: int,
    eps: float | None,
    preserve_zero: bool,
    domain: str | None,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero_point of ranges of any shape, in the dtype of min_val.

    Args:
        min_val: least value of each block.
        max_val: greatest value of each block.
        mapping: name of a MappingType.
        quant_min: least integer used.
        quant_max: greatest integer used.
        eps: the least scale; the dtype's own if None.
        preserve_zero: 0.0 is mapped to an integer exactly.
        domain: name of a ZeroPointDomain; None is taken for INT.

    Raises:
        ConfigError: the options contradict each other.
    """
    least = torch.finfo(min_val.dtype).eps if eps is None else eps
    low = min_val.clamp(max=0.0) if preserve_zero else min_val
    high = max_val.clamp(min=0.0) if preserve_zero else max_val
    if mapping in ("SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR"):
        if not preserve_zero or domain not in (None, "INT"):
            raise ConfigError("a symmetric mapping preserves zero and has an integer zero_point")
        if mapping == "SYMMETRIC":
            scale = torch.maximum(-low, high) / (float(quant_max - quant_min) / 2)
        else:
            scale = torch.maximum(low / float(quant_min), high / float(quant_max))
        scale = scale.clamp(min=least)
        return scale, torch.full_like(scale, int((quant_max + quant_min + 1) / 2))
    if mapping != "ASYMMETRIC":
        raise ConfigError(f"there is no mapping {mapping}")
    scale = ((high - low) / float(quant_max - quant_min)).clamp(min=least)
    if domain == "NONE":
        return scale, None
    if preserve_zero:
        return scale, (quant_min - torch.round(low / scale)).clamp(quant_min, quant_max)
    if domain != "FLOAT":
        raise ConfigError("without preserve_zero the zero_point must be in the FLOAT domain")
    return scale, low + scale * ((quant_max + quant_min + 1) / 2)


class _Round(torch.autograd.Function):
    """torch.round with the gradient of the identity."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


def _round(x: Tensor) -> Tensor:
    rounded: Tensor = _Round.apply(x)  # type: ignore[no-untyped-call]  # torch has no types for it
    return rounded


def fake_quantize_affine(
    x: Tensor,
    block_size: tuple[int, ...],
    scale: Tensor,
    zero_point: Tensor | None,
    *,
    quant_min: int,
    quant_max: int,
    domain: str,
) -> Tensor:
    """Quantize and dequantize block by block, in the dtype of x, with a straight-through gradient.

    Args:
        x: real values.
        block_size: shape of the blocks that share qparams.
        scale: one for each block, in any shape.
        zero_point: likewise; None in the domain NONE.
        quant_min: least integer used.
        quant_max: greatest integer used.
        domain: name of a ZeroPointDomain.
    """
    blocks, _, shape = block_view(x, block_size)
    scale = scale.view(shape)
    offset = None if zero_point is None else zero_point.view(shape)
    if domain == "FLOAT":
        assert offset is not None
        middle = (quant_max + quant_min + 1) / 2
        q = _round((blocks - (offset - scale * middle)) / scale).clamp(quant_min, quant_max)
        return ((q - middle).to(x.dtype) * scale + offset).view(x.shape).to(x.dtype)
    q = _round(blocks * (1.0 / scale))
    if offset is not None:
        q = q + offset
    q = q.clamp(quant_min, quant_max).to(x.dtype)
    if offset is not None:
        q = q - offset.to(x.dtype)
    return (q * scale).view(x.shape).to(x.dtype)


def insert_affine_qdq(
    model: GraphModule,
    node: Node,
    observer: Any,
    qparams: tuple[Tensor, Tensor | None] | None,
) -> None:
    """Replace an observer's node by quantize_affine and dequantize_affine.

    Args:
        model: owns the graph and will own the qparams.
        node: calls the observer; it is erased.
        observer: says dtype, range, blocks and mapping.
        qparams: scale and zero_point of each block; None chooses them at run time.

    Raises:
        MissingExtraError: torchao is not installed.
    """
    ops = _operators()
    source = node.args[0]
    assert isinstance(source, Node)
    insert = _Inserter(model, node)
    limits = (observer.target_dtype, observer.quant_min, observer.quant_max)
    value = node.meta.get("val")
    block = observer.block_size
    with model.graph.inserting_before(node):
        if qparams is None:
            asked = (source, observer.mapping_type.name, block, *limits, observer.eps)
            dtypes = observer.scale_dtype, observer.zero_point_dtype
            both = tuple(_like_blocks(value, block, dtype) for dtype in dtypes)
            choose = insert.call(ops.choose_qparams_affine, (*asked, *dtypes), both)
            scale = insert.call(operator.getitem, (choose, 0), both[0])
            zero_point: Node | None = insert.call(operator.getitem, (choose, 1), both[1])
        else:
            name = _free_name(model, source)
            scale = insert.constant(f"{name}_scale", qparams[0])
            held = qparams[1]
            zero_point = None if held is None else insert.constant(f"{name}_zero_point", held)
        arguments = (block, scale, zero_point, *limits)
        integers = None if value is None else value.to(_storage(observer.target_dtype))
        quantized = insert.call(ops.quantize_affine, (source, *arguments), integers)
        made = insert.call(ops.dequantize_affine, (quantized, *arguments), value)
        made.kwargs = {"output_dtype": observer.original_dtype}
    made.meta.update(node.meta)
    node.replace_all_uses_with(made)
    model.graph.erase_node(node)


class _Inserter:
    """Adds nodes that carry the trace of an observer's node, and a fake value if it has one."""

    def __init__(self, model: GraphModule, like: Node) -> None:
        self.model = model
        self.meta = {k: v for k, v in like.meta.items() if k != "val"}
        self.like = like.meta.get("val")

    def call(self, target: Any, arguments: tuple[Any, ...], value: Any) -> Node:
        """Add a call whose value is known."""
        return self._with(self.model.graph.call_function(target, arguments), value)

    def constant(self, name: str, tensor: Tensor) -> Node:
        """Register a buffer under a dotted name; returns the node that reads it."""
        owner, _, leaf = name.rpartition(".")
        self.model.get_submodule(owner).register_buffer(leaf, tensor.detach().clone())
        made = None
        if isinstance(self.like, Tensor):
            made = self.like.new_empty(tensor.shape, dtype=tensor.dtype)
        return self._with(self.model.graph.get_attr(name), made)

    def _with(self, node: Node, value: Any) -> Node:
        node.meta.update(self.meta)
        if value is not None:
            node.meta["val"] = value
        return node


def _like_blocks(value: Tensor | None, block: Sequence[int], dtype: torch.dtype | None) -> Any:
    """The fake qparams of a fake tensor: one for each block."""
    if value is None:
        return None
    shape = [size // part for size, part in zip(value.shape, block, strict=True)]
    return value.new_empty(shape, dtype=dtype or torch.float32)


def _storage(dtype: torch.dtype) -> torch.dtype:
    return DTYPES[dtype].storage if dtype in DTYPES else dtype


def _operators() -> Any:
    try:
        import torchao.quantization.quant_primitives  # noqa: F401  # registers the operators
    except ImportError as error:
        raise MissingExtraError("xnnpack", "torchao") from error
    return torch.ops.torchao


def _free_name(model: GraphModule, source: Node) -> str:
    """The base of the names of a node's qparams: its parameter, else the node itself."""
    base = str(source.target) if source.op == "get_attr" else source.name
    owner, _, leaf = base.rpartition(".")
    module = model.get_submodule(owner)
    name, count = leaf, 1
    while hasattr(module, f"{name}_scale") or hasattr(module, f"{name}_zero_point"):
        name, count = f"{leaf}_{count}", count + 1
    return f"{owner}.{name}" if owner else name
