"""Write the q/dq of quantized caches out in ATen operators, for runtimes that know no others."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.cache_ops import PackRows, UnpackRows, unpack_rows
from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.core.formats.format_ops import ChooseScales, DequantizeBlock, QuantizeBlock
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor, float_name
from pt2e_quant.core.read_capture import CAPTURE_KEY, capture_of
from pt2e_quant.graph.alias import roots, writes
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.idioms.cache_writes import cache_nodes
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.ops import arguments, aten
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult

_INT8 = (-128, 127, torch.int8)


def decompose_caches(*, has_casts: bool) -> GraphPass:
    """A pass that writes out what `quantize_caches` put around written buffers.

    Results are equal to the bit.

    Before:  s = choose_scales(new), n = quantize_block(new, s); y = dequantize_block(cache_q, t)
    After:   s = clamp(amax(abs(new), -1) / 127, tiny), n = quantize_per_tensor(new * (1 / s), 1.0);
             y = dequantize_per_tensor(cache_q, 1.0) * t

    A scale of 1 rounds and casts at once, in operators that every runtime has a kernel for. Rows
    of 4 bits are packed anew, without loss: delegates have no shifts, and a table of bytes is
    slow. A byte is then int8, the first half of a row plus 16 times the second.

    Args:
        has_casts: integers are cast to float, for runtimes that take a dequantize for one of
            activations and move it about; else dequantized with a scale of 1, for delegates
            that take no casts.
    """
    # A partial, not a closure, as all passes that take arguments.
    return GraphPass(
        "decompose_caches", partial(_decompose, has_casts=has_casts), needs=(HAS_VALUES,), gives=()
    )


def _decompose(gm: GraphModule, has_casts: bool) -> PassResult:
    caches = cache_nodes(gm)
    found = [n for n in gm.graph.nodes if n in caches and n.target in _WRITERS]
    refused = [Note(n.name, why, skipped=True) for n in found if (why := _refusal(n))]
    if refused or not found:
        return PassResult(changed=False, notes=tuple(refused))
    writer = _Writer(gm, has_casts=has_casts)
    pack_halves(gm, writer.editor)
    for node in found:
        writer.editor.replace(node, _WRITERS[node.target](writer, node))
    notes = (Note(node.name, "in ATen operators") for node in found)
    return PassResult(writer.editor.finish(), tuple(notes))


def _refusal(node: Node) -> str:
    """Why a node of a cache cannot be written out, or ""."""
    named = arguments(node)
    if node.target in (PackRows, UnpackRows):
        return "" if (named["bits"], named["is_signed"]) == (4, True) else "its codes are no int4"
    block = named["block_size"]
    if [*block] != [*[1] * (len(block) - 1), WHOLE]:
        return "its scales are not those of rows"
    others = [named.get("zero_points"), named.get("tensor_scale")]
    if any(other is not None for other in others):
        return "its qparams are more than a scale"
    if named.get("quant_min") == -8:
        return "its codes reach -8: a row's halves would not fit a byte"
    dtype = named["dtype"] if node.target is ChooseScales else torch.float32
    return "" if dtype == torch.float32 else f"its scales are {dtype}"


class _Writer:
    """Puts ATen operators in the place of one q/dq after another.

    Args:
        gm: the graph that is edited.
        has_casts: see `decompose_caches`.
    """

    def __init__(self, gm: GraphModule, *, has_casts: bool) -> None:
        self.editor = Editor(gm)
        self.has_casts = has_casts
        self.one: Node | None = None

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
        if self.one is None:
            self.one = self.editor.constant("one", torch.ones(1), like=node)
        inverse = self._call(node, aten.div.Tensor, self.one, named["scales"])
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
        """int8[..., N / 2] of int8[..., N]: the first half of a row plus 16 times the second."""
        steps = self._steps(node, arguments(node)["values"])
        half = steps.meta["val"].shape[-1] // 2
        first = self._call(node, aten.slice.Tensor, steps, -1, 0, half)
        second = self._call(node, aten.slice.Tensor, steps, -1, half, 2 * half)
        above = self._call(node, aten.mul.Tensor, second, HIGH_HALF)
        both = self._call(node, aten.add.Tensor, first, above)
        return self._call(node, QuantizePerTensor, both, 1.0, 0, *_INT8)

    def unpack(self, node: Node) -> Node:
        """float32[..., N] of int8[..., N / 2]."""
        both = self._steps(node, arguments(node)["packed"])
        sixteenths = self._call(node, aten.mul.Tensor, both, 1 / HIGH_HALF)
        nearest = self._call(node, aten.add.Tensor, sixteenths, 0.5)
        second = self._call(node, aten.floor.default, nearest)
        above = self._call(node, aten.mul.Tensor, second, HIGH_HALF)
        first = self._call(node, aten.sub.Tensor, both, above)
        return self._call(node, aten.cat.default, [first, second], -1)

    def _call(self, node: Node, target: Any, *args: Any) -> Node:
        return self.editor.call(target, *args, like=node, before=node)

    def _steps(self, node: Node, codes: Node) -> Node:
        """Integers as float32; those behind `unpack` are so already."""
        codes = self.editor.now(codes)
        if self.has_casts or codes.meta["val"].dtype == torch.float32:
            return self._cast(node, codes, torch.float32)
        return self._call(node, DequantizePerTensor, codes, 1.0, 0, *_INT8)

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


HIGH_HALF = 16
"""The number of values of half a byte."""


def pack_halves(gm: GraphModule, editor: Editor) -> None:
    """Give caches of 4 bits as int8[..., N / 2]: the first half of a row plus 16 times the second.

    The values are as before, -7 to 7. What packs and unpacks them is left to the caller.

    Before:  cache_q uint8[..., N / 2], in the format of `core.packing`
    After:   cache_halves int8[..., N / 2]
    """
    root = roots(gm.graph)
    caches = (root[into] for node in gm.graph.nodes for into in _packed(node))
    packed = {str(cache.target): float_name(cache) for cache in caches}
    renamed = {name: f"{packed[name]}_halves" for name in sorted(packed)}
    for name in renamed:
        renamed[name] = _repack(gm, editor, root, name, renamed[name])
    if renamed and CAPTURE_KEY in gm.meta:
        capture = capture_of(gm)
        kept = (renamed.get(name, name) for name in capture.mutated_buffers)
        gm.meta[CAPTURE_KEY] = replace(capture, mutated_buffers=tuple(sorted(kept)))


def _packed(node: Node) -> list[Node]:
    """The values that are caches of 4 bits, by what a node does with them."""
    if node.target is UnpackRows:
        return list(node.all_input_nodes)
    users = node.users if node.target is PackRows else ()
    return [into for user in users for into in writes(user)]


def _repack(gm: GraphModule, editor: Editor, root: dict[Node, Node], name: str, new: str) -> str:
    """Put a repacked buffer in the place of one; its name."""
    held = attribute(gm, name)
    assert isinstance(held, Tensor)
    first, second = unpack_rows(held, 4, True).chunk(2, -1)
    readers = [n for n in gm.graph.nodes if n.op == "get_attr" and n.target == name]
    made = editor.constant(new, first + HIGH_HALF * second, like=readers[0])
    for node, source in root.items():
        value: Any = node.meta.get("val")
        if source in readers and node is not source and isinstance(value, Tensor):
            node.meta["val"] = editor.fake_like(value, torch.int8)
    for reader in readers:
        editor.replace(reader, made)
    return str(made.target)
