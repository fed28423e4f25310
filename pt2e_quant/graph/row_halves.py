"""Quantized caches of 4 bits in bytes that arithmetic alone takes apart."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.cache_ops import PackRows, UnpackRows, unpack_rows
from pt2e_quant.core.qdq import float_name
from pt2e_quant.core.read_capture import CAPTURE_KEY, capture_of
from pt2e_quant.graph.alias import roots, writes
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute

NIBBLE = 16
"""How many values half a byte has."""


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
    made = editor.constant(new, first + NIBBLE * second, like=readers[0])
    for node, source in root.items():
        value: Any = node.meta.get("val")
        if source in readers and node is not source and isinstance(value, Tensor):
            node.meta["val"] = editor.fake_like(value, torch.int8)
    for reader in readers:
        editor.replace(reader, made)
    return str(made.target)
