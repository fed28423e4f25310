"""Write the q/dq of quantized caches out in ATen operators, for runtimes that know no others."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.blocks import WHOLE
from pt2e_quant.core.cache_ops import PackRows, UnpackRows
from pt2e_quant.core.format_ops import ChooseScales, DequantizeBlock, QuantizeBlock
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.graph.cache_nodes import cache_nodes
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import arguments, aten
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass

__all__ = ["decompose_caches"]

_NIBBLE = 16
"""How many values half a byte has."""


@graph_pass()
def decompose_caches(gm: GraphModule) -> PassResult:
    """Write out what `quantize_caches` put around written buffers; results are equal to the bit.

    Before:  s = choose_scales(new), n = quantize_block(new, s); y = dequantize_block(cache_q, t)
    After:   s = clamp(amax(abs(new), -1) / 127, tiny), n = quantize_per_tensor(new * (1 / s), 1.0);
             y = dequantize_per_tensor(cache_q, 1.0) * t

    A scale of 1 rounds and casts at once, in operators that every runtime has a kernel for. Rows
    of 4 bits are two values to a byte: packed by a product with (1, 16), looked up by byte in a
    table of pairs: ExecuTorch has no shifts, and ONNX Runtime's are no quicker.
    """
    caches = cache_nodes(gm)
    writer = _Writer(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if n in caches and n.target in _WRITERS]:
        reason = _refusal(node)
        if reason:
            notes.append(Note(node.name, reason, skipped=True))
            continue
        writer.editor.replace(node, _WRITERS[node.target](writer, node))
        notes.append(Note(node.name, "in ATen operators"))
    return PassResult(writer.editor.finish(), tuple(notes))


def _refusal(node: Node) -> str:
    """Why a node of a cache is left as it is, or ""."""
    named = arguments(node)
    if node.target in (PackRows, UnpackRows):
        return "" if (named["bits"], named["is_signed"]) == (4, True) else "its codes are no int4"
    block = named["block_size"]
    if [*block] != [*[1] * (len(block) - 1), WHOLE]:
        return "its scales are not those of rows"
    others = [named.get("zero_points"), named.get("tensor_scale")]
    if any(other is not None for other in others):
        return "its qparams are more than a scale"
    dtype = named["dtype"] if node.target is ChooseScales else torch.float32
    return "" if dtype == torch.float32 else f"its scales are {dtype}"


class _Writer:
    """Puts ATen operators in the place of one q/dq after another.

    Args:
        gm: the graph that is edited.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.editor = Editor(gm)
        self.held: dict[str, Node] = {}

    def choose_scales(self, node: Node) -> Node:
        """float32[..., 1]: the greatest magnitude of each row over the limit."""
        named = arguments(node)
        tiny = torch.finfo(torch.float32).tiny
        reals = self._call(node, aten.abs.default, self._cast(node, named["input"], torch.float32))
        greatest = self._call(node, aten.amax.default, reals, [-1], True)
        scales = self._call(node, aten.div.Tensor, greatest, named["limit"])
        return self._call(node, aten.clamp.default, scales, tiny)

    def quantize(self, node: Node) -> Node:
        """int8[..., N]; rounded times the reciprocal, as the operator does."""
        named = arguments(node)
        reals = self._cast(node, named["input"], torch.float32)
        one = self._held("one", torch.ones(1), node)
        inverse = self._call(node, aten.div.Tensor, one, named["scales"])
        steps = self._call(node, aten.mul.Tensor, reals, inverse)
        limits = named["quant_min"], named["quant_max"], named["dtype"]
        return self._call(node, QuantizePerTensor, steps, 1.0, 0, *limits)

    def dequantize(self, node: Node) -> Node:
        """Real values [..., N] of integers, which behind `unpack` are float already."""
        named = arguments(node)
        steps = self._steps(node, named["input"])
        reals = self._call(node, aten.mul.Tensor, steps, named["scales"])
        return self._cast(node, reals, named["out_dtype"] or torch.float32)

    def pack(self, node: Node) -> Node:
        """uint8[..., N / 2]: the first of two values in the low half."""
        values: Node = arguments(node)["values"]
        steps = self._steps(node, values)
        sixteenths = self._call(node, aten.floor.default, self._times(node, steps, 1 / _NIBBLE))
        above = self._times(node, sixteenths, _NIBBLE)
        halves = self._call(node, aten.sub.Tensor, steps, above)  # modulo 16: two's complement
        pairs = self._call(
            node, aten.unflatten.int, halves, -1, [values.meta["val"].shape[-1] // 2, 2]
        )
        places = self._held("places_of_nibbles", torch.tensor([[1.0, _NIBBLE]]), node)
        bytes_ = self._call(node, aten.linear.default, pairs, places)
        return self._cast(node, self._call(node, aten.squeeze.dim, bytes_, -1), torch.uint8)

    def unpack(self, node: Node) -> Node:
        """float32[..., N] of uint8[..., N / 2]."""
        packed: Node = arguments(node)["packed"]
        index = self._cast(node, packed, torch.int32)
        table = self._held("pairs_of_bytes", _pairs(), node)
        rows = self._call(node, aten.embedding.default, table, index)
        return self._call(node, aten.flatten.using_ints, rows, -2, -1)

    def _call(self, node: Node, target: Any, *args: Any) -> Node:
        return self.editor.call(target, *args, like=node, before=node)

    def _held(self, name: str, tensor: Tensor, node: Node) -> Node:
        """A constant, the same node for all caches."""
        if name not in self.held:
            self.held[name] = self.editor.constant(name, tensor, like=node)
        return self.held[name]

    def _times(self, node: Node, value: Node, factor: float) -> Node:
        return self._call(node, aten.mul.Tensor, value, factor)

    def _steps(self, node: Node, codes: Node) -> Node:
        """Integers as float32; those behind `unpack` are so already."""
        codes = self.editor.now(codes)
        if codes.meta["val"].dtype == torch.float32:
            return codes
        limits = -128, 127, torch.int8
        return self._call(node, DequantizePerTensor, codes, 1.0, 0, *limits)

    def _cast(self, node: Node, value: Node, dtype: torch.dtype) -> Node:
        value = self.editor.now(value)
        if value.meta["val"].dtype == dtype:
            return value
        return self.editor.call(aten._to_copy.default, value, dtype=dtype, like=node, before=node)


_WRITERS = {
    ChooseScales: _Writer.choose_scales,
    QuantizeBlock: _Writer.quantize,
    DequantizeBlock: _Writer.dequantize,
    PackRows: _Writer.pack,
    UnpackRows: _Writer.unpack,
}


def _pairs() -> Tensor:
    """float32[256, 2]: both values of each byte, two's complement."""
    byte = torch.arange(_NIBBLE * _NIBBLE)
    halves = torch.stack([byte % _NIBBLE, byte // _NIBBLE], 1)
    return torch.where(halves < _NIBBLE // 2, halves, halves - _NIBBLE).float()
