"""Embedding tables looked up with operators that every ExecuTorch runtime has."""

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.backends.xnnpack.passes.nibble_tables import OFFSET, pack_nibbles
from pt2e_quant.backends.xnnpack.passes.table_lookups import (
    FIND_GROUPS,
    FIND_ROWS,
    constant_read,
    decline_groups,
    decline_rows,
    group_size,
    is_int4_rows,
)
from pt2e_quant.graph.ops import aten
from pt2e_quant.graph.pattern import Match
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Editor, Rule, Skip, rewrite


@graph_pass(needs=(HAS_VALUES,), gives=())
def embed_portable(gm: GraphModule) -> PassResult:
    """Look rows and their scales up with portable operators.

    Before:  embedding(dequantize_per_channel(table_q, scale, zero_point, 0), indices)
    After:   float(embedding(table_q, indices)) * embedding(scale_column, indices)

    Before:  embedding(dequantize_per_channel_group(table_q, scale, zero_point, -8, 7), indices)
    After:   embedding(pairs, long(embedding(packed, indices))) * embedding(scale, indices)

    A byte's two integers are looked up in a table of all bytes, for the portable kernels have no
    shifts. They stand as the delegate packs them, so that a tied table is in the file once.
    """

    def rows(m: Match, editor: Editor) -> Node | Skip:
        if (declined := decline_rows(m, gm)) is not None:
            return declined
        if constant_read(gm, m["zero_point"]).any():
            return Skip("the portable form has no zero_point")
        return _nibbles(gm, m, editor) if is_int4_rows(m, gm) else _bytes(gm, m, editor)

    def groups(m: Match, editor: Editor) -> Node | Skip:
        declined = decline_groups(m, gm)
        return _nibbles(gm, m, editor) if declined is None else declined

    rules = (
        Rule("embedding_portable", find=FIND_ROWS, build=rows),
        Rule("embedding_portable_4bit", find=FIND_GROUPS, build=groups),
    )
    return rewrite(gm, rules)


def _bytes(gm: GraphModule, m: Match, editor: Editor) -> Node:
    rows = editor.call(aten.embedding.default, m["table"], m["indices"], like=m.anchor)
    cast = editor.call(aten._to_copy.default, rows, dtype=torch.float32, like=m.anchor)
    return editor.call(aten.mul.Tensor, cast, _scales(gm, m, editor), like=m.anchor)


def _nibbles(gm: GraphModule, m: Match, editor: Editor) -> Node:
    """float32[..., columns] of bytes uint8[rows, columns / 2], even columns low."""
    like = m.anchor
    table = pack_nibbles(constant_read(gm, m["table"]), even_high=False)
    packed = editor.constant(f"{m['table'].target}_nibbles", table, like=like)
    byte = torch.arange(256)
    values = torch.stack([byte & 15, byte >> 4], dim=1) - OFFSET
    pairs = editor.constant(f"{m['table'].target}_pairs", values.float(), like=like)
    found = editor.call(aten.embedding.default, packed, m["indices"], like=like)
    index = editor.call(aten._to_copy.default, found, dtype=torch.int64, like=like)
    rows = editor.call(aten.embedding.default, pairs, index, like=like)
    rows = editor.call(aten.flatten.using_ints, rows, -2, -1, like=like)
    scales = _scales(gm, m, editor)
    groups = scales.meta["val"].shape[-1]
    if groups == 1:
        return editor.call(aten.mul.Tensor, rows, scales, like=like)
    rows = editor.call(aten.unflatten.int, rows, -1, [groups, group_size(m)], like=like)
    # Not unsqueeze: the delegate takes that one, and fails where two sizes are dynamic.
    column = editor.call(aten.unflatten.int, scales, -1, [groups, 1], like=like)
    product = editor.call(aten.mul.Tensor, rows, column, like=like)
    return editor.call(aten.flatten.using_ints, product, -2, -1, like=like)


def _scales(gm: GraphModule, m: Match, editor: Editor) -> Node:
    """The scales of the rows looked up, float32[..., groups]."""
    stored = constant_read(gm, m["scale"]).float()
    matrix = stored.reshape(len(stored), -1).clone()
    scales = editor.constant(f"{m['scale'].target}_column", matrix, like=m.anchor)
    return editor.call(aten.embedding.default, scales, m["indices"], like=m.anchor)
