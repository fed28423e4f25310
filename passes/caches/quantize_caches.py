"""Keep the caches that a graph writes (keys and values of attention) in 8 or 4 bits."""

import fnmatch
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.cache_ops import PackRows, UnpackRows
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.format_ops import ChooseScales, DequantizeBlock, QuantizeBlock
from pt2e_quant.core.provenance import TensorRecord, provenance_of
from pt2e_quant.core.qdq import FLOAT_NAME_KEY, is_dequantize
from pt2e_quant.core.read_capture import CAPTURE_KEY, capture_of
from pt2e_quant.core.schemes import Role
from pt2e_quant.graph.alias import roots, writes
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.ops import arguments
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult

_aten: Any = torch.ops.aten

_SOURCES = {
    _aten.index_copy_.default: "source",
    _aten.index_put_.default: "values",
    _aten.copy_.default: "src",
}
"""The writes that are understood, and which argument holds the new values."""

_PARTS = (_aten.slice.Tensor, _aten.select.int)


def quantize_caches(bits: int = 8, names: str = "*") -> GraphPass:
    """A pass that stores written float buffers as symmetric integers, a scale for each last row.

    Before:  k = index_copy_(cache, 2, pos, new); y = q @ k
    After:   s = choose_scales(new), n = quantize_block(new, s)
             i = index_copy_(cache_q, 2, pos, n), t = index_copy_(cache_scale, 2, pos, s)
             y = q @ dequantize_block(i, t)

    The buffers are still mutated buffers: a re-export keeps them so. What each holds now is kept,
    rounded. A position is quantized once, when it is written. `quantizer.quantize_caches()` lets
    convert run it; `run_passes` does on any converted graph.

    Args:
        bits: 8, or 4 packed in bytes.
        names: a glob of the buffers' dotted names.

    Raises:
        ConfigError: bits is neither.
    """
    if bits not in (4, 8):
        raise ConfigError(f"caches are kept in 8 or 4 bits, found {bits}")

    # A partial, not a closure: a prepared graph that holds the pass can be pickled.
    return GraphPass(
        "quantize_caches", partial(_quantize, bits=bits, names=names), needs=(HAS_VALUES,), gives=()
    )


@dataclass(slots=True)
class _Cache:
    """A written buffer with its reads and writes.

    Attributes:
        target: its dotted name.
        holders: the nodes that are it: its reads, and the results of writes to all of it.
        whole: writes whose destination is one of them.
        parts: writes to a part of it, with the node that takes the part.
        readers: the nodes that read its values.
    """

    target: str
    value: Tensor
    holders: dict[Node, None] = field(default_factory=dict)
    whole: dict[Node, None] = field(default_factory=dict)
    parts: dict[Node, Node] = field(default_factory=dict)
    readers: dict[Node, None] = field(default_factory=dict)


def _quantize(gm: GraphModule, bits: int, names: str) -> PassResult:
    editor = Editor(gm)
    notes: list[Note] = []
    renamed: dict[str, tuple[str, str]] = {}
    for cache in _written_buffers(gm, names):
        reason = _follow(cache, bits)
        if reason:
            notes.append(Note(cache.target.replace(".", "_"), reason, skipped=True))
            continue
        made = _Rewrite(editor, cache, bits)
        made.run()
        renamed[cache.target] = str(made.codes.target), str(made.scales.target)
        notes.append(Note(made.codes.name, f"{cache.target}: kept in {bits} bits"))
        provenance_of(gm).tensors.append(made.record())
    changed = editor.finish()
    if renamed and CAPTURE_KEY in gm.meta:
        capture = capture_of(gm)
        kept = [n for name in capture.mutated_buffers for n in renamed.get(name, (name,))]
        gm.meta[CAPTURE_KEY] = replace(capture, mutated_buffers=tuple(sorted(kept)))
    return PassResult(changed, tuple(notes))


def _written_buffers(gm: GraphModule, names: str) -> list[_Cache]:
    """The float buffers of 2 dimensions or more that the graph writes, in graph order."""
    root = roots(gm.graph)
    written = {
        str(root[v].target)
        for node in gm.graph.nodes
        for v in writes(node)
        if root[v].op == "get_attr"
    }
    found: dict[str, _Cache] = {}
    for node in gm.graph.nodes:
        target = str(node.target)
        if node.op != "get_attr" or target not in written:
            continue
        value = attribute(gm, target)
        is_cache = isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2
        if is_cache and fnmatch.fnmatchcase(target, names):
            found.setdefault(target, _Cache(target, value)).holders[node] = None
    return list(found.values())


def _follow(cache: _Cache, bits: int) -> str:
    """Sort the uses of a cache into writes and reads; returns why it cannot be quantized, or ""."""
    width = cache.value.shape[-1]
    if width * bits % 8:
        return f"rows of {width} values in {bits} bits are no whole bytes"
    waiting = list(cache.holders)
    while waiting:
        holder = waiting.pop()
        for user in holder.users:
            if user in cache.whole or user in cache.readers:
                continue
            reason = _sort(cache, holder, user, waiting)
            if reason:
                return reason
    if not cache.whole and not cache.parts:
        return "nothing that is understood writes it"
    return ""


def _sort(cache: _Cache, holder: Node, user: Node, waiting: list[Node]) -> str:
    """Take in one use of a cache."""
    if user.op == "output":
        return "it is returned"
    if is_dequantize(user):
        return "it holds the scales of a quantized cache"
    if holder in writes(user):
        reason = _refusal(cache, user, cache.value.dim() - 1)
        cache.whole[user] = None
        cache.holders[user] = None
        waiting.append(user)
        return reason
    stores = [u for u in user.users if user in writes(u)]
    if not stores:
        cache.readers[user] = None
        return ""
    if user.target not in _PARTS or len(stores) != 1 or len(user.users) != 1 or stores[0].users:
        return f"{user.name} is a view of it that is written"
    part = arguments(user)
    if part["dim"] % cache.value.dim() == cache.value.dim() - 1:
        return f"{user.name} takes part of a row"
    cache.parts[stores[0]] = user
    return _refusal(cache, stores[0], user.meta["val"].dim() - 1)


def _refusal(cache: _Cache, write: Node, last: int) -> str:
    """Why a write cannot be one of whole rows, or ""."""
    name = _SOURCES.get(write.target)
    if name is None:
        return f"{write.name} ({write.target}) writes it"
    named = arguments(write)
    source = named[name]
    if not isinstance(source, Node) or not isinstance(source.meta.get("val"), Tensor):
        return f"{write.name} writes a number"
    shape = source.meta["val"].shape
    if not shape or shape[-1] != cache.value.shape[-1]:
        return f"{write.name} writes no whole rows"
    if named.get("accumulate"):
        return f"{write.name} adds to it"
    if "dim" in named and named["dim"] % (last + 1) == last:
        return f"{write.name} writes columns"
    if len(named.get("indices", ())) > last:
        return f"{write.name} writes single values"
    return ""


class _Rewrite:
    """Puts the integers of one cache in its place."""

    def __init__(self, editor: Editor, cache: _Cache, bits: int) -> None:
        self.editor = editor
        self.cache = cache
        self.bits = bits
        self.limit = (1 << (bits - 1)) - 1
        self.like = next(iter(cache.holders))
        value = cache.value.detach()
        block = self._block(value.dim())
        scales = ChooseScales(value, None, block, float(self.limit), torch.float32)
        codes = QuantizeBlock(value, scales, None, *self._layout(value.dim()))
        if bits < 8:
            codes = PackRows(codes, bits, True)
        # Clones: a view made without gradients must not be written where they are on.
        self.codes = editor.constant(f"{cache.target}_q", codes.clone(), like=self.like)
        self.codes.meta[FLOAT_NAME_KEY] = str(cache.target)
        self.scales = editor.constant(f"{cache.target}_scale", scales.clone(), like=self.like)
        self.now: dict[Node, tuple[Node, Node]] = dict.fromkeys(
            cache.holders, (self.codes, self.scales)
        )

    def run(self) -> None:
        """Writes first, in graph order, then reads."""
        order = {node: i for i, node in enumerate(self.editor.graph.nodes)}
        for write in sorted([*self.cache.whole, *self.cache.parts], key=order.__getitem__):
            self._write(write)
        for reader in self.cache.readers:
            self._read(reader)
        dead = [*self.cache.whole, *self.cache.parts, *self.cache.parts.values()]
        for node in sorted(dead, key=order.__getitem__, reverse=True):
            self.editor.graph.erase_node(node)
        self.editor.discard(n for n in self.cache.holders if n.op == "get_attr")

    def record(self) -> TensorRecord:
        """The cache's row in the table of tensors."""
        before, codes, scales = (
            t.numel() * t.element_size()
            for t in (
                self.cache.value,
                self.codes.meta["val"],
                self.scales.meta["val"],
            )
        )
        return TensorRecord(
            name=self.cache.target,
            role=Role.INPUT,
            rule="quantize_caches",
            uses=[f"{self.cache.target} -> {reader.name}" for reader in self.cache.readers],
            dtype=f"int{self.bits}",
            quant_min=-self.limit,
            quant_max=self.limit,
            block=self._block(self.cache.value.dim()),
            is_dynamic=True,
            size_before=before,
            size_after=codes + scales,
        )

    def _block(self, dim: int) -> list[int]:
        return [1] * (dim - 1) + [-1]

    def _layout(self, dim: int) -> tuple[Any, ...]:
        return self._block(dim), -self.limit, self.limit, torch.int8

    def _write(self, write: Node) -> None:
        named = arguments(write)
        source: Node = named[_SOURCES[write.target]]
        dim = source.meta["val"].dim()

        def call(target: Any, *args: Any) -> Node:
            return self.editor.call(target, *args, like=write, before=write)

        scales = call(
            ChooseScales, source, None, self._block(dim), float(self.limit), torch.float32
        )
        codes = call(QuantizeBlock, source, scales, None, *self._layout(dim))
        if self.bits < 8:
            codes = call(PackRows, codes, self.bits, True)
        part = self.cache.parts.get(write)
        results = []
        for buffer, values in ((self.codes, codes), (self.scales, scales)):
            into = buffer if part is None else call(part.target, buffer, *part.args[1:])
            swap = {write.args[0]: into, source: values}
            args = [swap.get(a, a) if isinstance(a, Node) else a for a in write.args]
            results.append(call(write.target, *args))
        self.now[write] = results[0], results[1]

    def _read(self, reader: Node) -> None:
        """A dequantize for each reader, where it reads: it sees the writes in front of it."""
        value = self.cache.value
        for holder in [n for n in reader.all_input_nodes if n in self.cache.holders]:
            codes, scales = self.now[holder]

            def call(target: Any, *args: Any, **named: Any) -> Node:
                return self.editor.call(target, *args, like=reader, before=reader, **named)

            if self.bits < 8:
                codes = call(UnpackRows, codes, self.bits, True)
            layout = self._layout(value.dim())
            plain = value.dtype == torch.float32
            named = {} if plain else {"out_dtype": value.dtype}
            real = call(DequantizeBlock, codes, scales, None, *layout, **named)
            reader.replace_input_with(holder, real)
