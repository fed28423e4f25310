"""Embedding tables kept as int8 or uint8, one scale per row, or as int4 in rows or groups.

`quantized_decomposed::embedding_byte` and `embedding_4bit` dequantize only the rows that are looked
up. They live in ExecuTorch's quantized kernels, which a device has to link; `embed_portable` does
the same with operators that every ExecuTorch runtime has.

`embedding_4bit` finds the even column in a byte's high half, the delegate in its low half; both
keep the integer plus 8. So either reads the other's bytes with each two neighbouring columns
swapped, and the same scales hold where a group is an even number of columns.
"""

from collections import Counter

import executorch.exir.passes._quant_patterns_and_replacements  # noqa: F401
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2e_quant.backends.xnnpack.passes.kernel_forms import is_int4, why_no_kernel
from pt2e_quant.core.qdq import (
    DequantizePerChannel,
    DequantizePerGroup,
    is_dequantize,
    required_attribute,
)
from pt2e_quant.graph.ops import EMBEDDING, LINEAR, argument, aten, is_call
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Editor, Rule, Skip, rewrite

# Registers quantized_decomposed::embedding_byte; nothing of the module is used.


LINKED_KERNELS = ("quantized_decomposed.embedding_byte", "quantized_decomposed.embedding_4bit")
"""The kernels that a device must link."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def embed_bytes(gm: GraphModule) -> PassResult:
    """Look rows up with ExecuTorch's kernels for one byte, or half a byte, an integer.

    Before:  embedding(dequantize_per_channel(table_q, scale, zero_point, 0), indices)
    After:   embedding_byte(table_q, scale, None, -127, 127, indices)

    Before:  embedding(dequantize_per_channel_group(table_q, scale, zero_point, -8, 7), indices)
    After:   embedding_4bit(packed, scale, None, -8, 7, indices)

    A table tied to a linear gets a constant of its own, for one that both read would cut the
    delegate; `share_constants` finds the equal bytes in the file. Of 4 bits, such a table is
    packed as the delegate packs it, and the columns that the kernel reads are put in order:

    After:   index_select(embedding_4bit(packed, scale, None, -8, 7, indices), -1, columns)
    """
    lookups = _Lookups(gm)
    result = rewrite(
        gm,
        (
            Rule("embedding_byte", find=FIND_ROWS, build=lookups.of_rows),
            Rule("embedding_4bit", find=FIND_GROUPS, build=lookups.of_groups),
        ),
    )
    declined = (note for note in result.notes if note.skipped)
    return PassResult(result.changed, (*declined, *lookups.told))


class _Lookups:
    """Builds calls of ExecuTorch's kernels on the tables of one graph."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        constants = (n for n in gm.graph.nodes if n.op == "get_attr")
        self.reads = Counter(str(n.target) for n in constants for _ in n.users)
        self.told: list[Note] = []

    def of_rows(self, m: Match, editor: Editor) -> Node | Skip:
        """A scale for each row: int8, or int4 of which two fit into a byte."""
        if (declined := decline_rows(m, self.gm)) is not None:
            return declined
        if is_int4_rows(m, self.gm):
            return self._int4(m, editor)
        zero_points = constant_read(self.gm, m["zero_point"])
        zero_point = None
        if zero_points.any():
            name = str(m["zero_point"].target)
            zero_point = editor.constant(f"{name}_float", zero_points.float(), like=m.anchor)
        return editor.call(
            torch.ops.quantized_decomposed.embedding_byte.default,
            self._own("table", m, editor),
            self._own("scale", m, editor),
            zero_point,
            m["quant_min"],
            m["quant_max"],
            m["indices"],
            like=m.anchor,
            val=m.anchor.meta["val"],
        )

    def of_groups(self, m: Match, editor: Editor) -> Node | Skip:
        """int4 in groups."""
        declined = decline_groups(m, self.gm)
        return self._int4(m, editor) if declined is None else declined

    def _int4(self, m: Match, editor: Editor) -> Node:
        """Two integers to a byte, in the delegate's order if it keeps the same ones."""
        is_tied = delegate_keeps(self.gm, m["table"])
        is_shared = is_tied and group_size(m) % 2 == 0
        packed = pack_int4(constant_read(self.gm, m["table"]), even_high=not is_shared)
        rows = editor.call(
            torch.ops.quantized_decomposed.embedding_4bit.default,
            editor.constant(f"{m['table'].target}_nibbles", packed, like=m.anchor),
            self._own("scale", m, editor),
            None,
            m["quant_min"],
            m["quant_max"],
            m["indices"],
            like=m.anchor,
            val=m.anchor.meta["val"],
        )
        if is_tied:
            text = _storage(packed, is_shared, in_groups=m["scale"].meta["val"].dim() == 2)
            self.told.append(Note(m.anchor.name, text))
        return swap_columns(rows, editor, like=m.anchor) if is_shared else rows

    def _own(self, name: str, m: Match, editor: Editor) -> Node:
        """A constant that nothing else reads: one shared with a linear would cut the delegate."""
        node: Node = m[name]
        if self.reads[str(node.target)] == 1:
            return node
        copied = constant_read(self.gm, node).clone()
        return editor.constant(f"{node.target}_rows", copied, like=m.anchor)


def _storage(packed: Tensor, is_shared: bool, *, in_groups: bool) -> str:
    """The note of the report on a table of 4 bits that the delegate keeps too."""
    if not is_shared:
        text = f"its table is in the file twice, {packed.numel():,} bytes more: the delegate has "
        return text + "another order of columns, which groups of an odd size do not follow"
    scales = "; scales twice, as the delegate's are bfloat16" if in_groups else ""
    return f"its 4-bit integers are in the file once, for it and for the linear{scales}"


@graph_pass(needs=(HAS_VALUES,), gives=())
def embed_portable(gm: GraphModule) -> PassResult:
    """Look rows and their scales up with portable operators.

    Before:  embedding(dequantize_per_channel(table_q, scale, zero_point, 0), indices)
    After:   float(embedding(table_q, indices)) * embedding(scale_column, indices)

    Zero points other than 0 are looked up as the scales are, and subtracted.

    Before:  embedding(dequantize_per_channel_group(table_q, scale, zero_point, -8, 7), indices)
    After:   embedding(pairs, long(embedding(packed, indices))) * embedding(scale, indices)

    A byte's two integers are looked up in a table of all bytes, for the portable kernels have no
    shifts. They stand as the delegate packs them, so that a tied table is in the file once.
    """

    def rows(m: Match, editor: Editor) -> Node | Skip:
        if (declined := decline_rows(m, gm)) is not None:
            return declined
        return _int4(gm, m, editor) if is_int4_rows(m, gm) else _bytes(gm, m, editor)

    def groups(m: Match, editor: Editor) -> Node | Skip:
        declined = decline_groups(m, gm)
        return _int4(gm, m, editor) if declined is None else declined

    rules = (
        Rule("embedding_portable", find=FIND_ROWS, build=rows),
        Rule("embedding_portable_4bit", find=FIND_GROUPS, build=groups),
    )
    return rewrite(gm, rules)


def _bytes(gm: GraphModule, m: Match, editor: Editor) -> Node:
    rows = editor.call(aten.embedding.default, m["table"], m["indices"], like=m.anchor)
    value = editor.call(aten._to_copy.default, rows, dtype=torch.float32, like=m.anchor)
    if constant_read(gm, m["zero_point"]).any():
        zero_points = _columns_of_rows(gm, m, "zero_point", editor)
        value = editor.call(aten.sub.Tensor, value, zero_points, like=m.anchor)
    return editor.call(aten.mul.Tensor, value, _scales(gm, m, editor), like=m.anchor)


def _int4(gm: GraphModule, m: Match, editor: Editor) -> Node:
    """float32[..., columns] of bytes uint8[rows, columns / 2], even columns low."""
    like = m.anchor
    table = pack_int4(constant_read(gm, m["table"]), even_high=False)
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
    return _columns_of_rows(gm, m, "scale", editor)


def _columns_of_rows(gm: GraphModule, m: Match, name: str, editor: Editor) -> Node:
    """A qparam of the rows looked up, float32[..., groups]."""
    stored = constant_read(gm, m[name]).float()
    matrix = stored.reshape(len(stored), -1).clone()
    columns = editor.constant(f"{m[name].target}_column", matrix, like=m.anchor)
    return editor.call(aten.embedding.default, columns, m["indices"], like=m.anchor)


OFFSET = 8
"""Added to an integer before it is stored, so that nibbles are unsigned."""


def pack_int4(table: Tensor, *, even_high: bool) -> Tensor:
    """uint8[rows, columns / 2] of int8[rows, columns], whose integers are -8 to 7.

    Args:
        table: the integers; the number of columns is even.
        even_high: the even column of a byte is its high half, as `embedding_4bit` reads it; else
            its low half, as the delegate does.
    """
    shifted = (table + OFFSET).to(torch.uint8)
    even, odd = shifted[:, ::2], shifted[:, 1::2]
    return (even << 4) | odd if even_high else (odd << 4) | even


def delegate_keeps(gm: GraphModule, table: Node) -> bool:
    """True if a linear of the delegate has a constant for its weight, in 4 bits."""
    constants = gm.graph.find_nodes(op="get_attr", target=table.target)
    weights = [w for c in constants for w in c.users if is_dequantize(w) and is_int4(w)]
    readers = [(w, user) for w in weights for user in w.users if is_call(user, LINEAR)]
    return any(argument(n, "weight") is w and why_no_kernel(gm, n) is None for w, n in readers)


def swap_columns(rows: Node, editor: Editor, *, like: Node) -> Node:
    """Rows [..., columns] with columns 0 and 1 swapped, 2 and 3, and so on.

    An index_select costs a third of a flip of views in ExecuTorch's portable kernels, and takes
    any number of dynamic sizes.
    """
    value = like.meta["val"]
    order = torch.arange(value.shape[-1], dtype=torch.int32) ^ 1
    columns = editor.constant(f"{like.name}_columns", order, like=like)
    return editor.call(aten.index_select.default, rows, -1, columns, like=like, val=value)


def _lookup(dequantize: OpOverload, *names: str) -> Op:
    values = Op(dequantize, *map(Var, names), name="dequantize", users=None)
    return Op(EMBEDDING, values, Var("indices"))


_OF_ROWS = "table", "scale", "zero_point", "axis", "quant_min", "quant_max"
FIND_ROWS = _lookup(DequantizePerChannel, *_OF_ROWS)
"""A table with a scale for each row."""

_OF_GROUPS = "table", "scale", "zero_point", "quant_min", "quant_max", "dtype"
FIND_GROUPS = _lookup(DequantizePerGroup, *_OF_GROUPS)
"""A table with a scale for each group of a row's columns."""


def decline_rows(m: Match, gm: GraphModule) -> Skip | None:
    """Why a match of `FIND_ROWS` has no form here; None if it has."""
    if (declined := _decline(m)) is not None:
        return declined
    if m["axis"] != 0 or constant_read(gm, m["table"]).dtype not in (torch.int8, torch.uint8):
        return Skip("its table is not int8 or uint8 per row")
    return None


def decline_groups(m: Match, gm: GraphModule) -> Skip | None:
    """Why a match of `FIND_GROUPS` has no form here; None if it has."""
    if (declined := _decline(m)) is not None:
        return declined
    if not is_int4(m.node("dequantize")):
        return Skip("its groups are not int4")
    if _columns(m) % 2:
        return Skip("two integers to a byte take an even number of columns")
    return Skip("its zero_points are not 0") if constant_read(gm, m["zero_point"]).any() else None


def _decline(m: Match) -> Skip | None:
    if not all(isinstance(m[v], Node) and m[v].op == "get_attr" for v in ("table", "scale")):
        return Skip("its table is computed at run time")
    if argument(m.anchor, "scale_grad_by_freq") or argument(m.anchor, "sparse"):
        return Skip("it is a training embedding")
    return None


def is_int4_rows(m: Match, gm: GraphModule) -> bool:
    """True if the rows of a match of `FIND_ROWS` fit into half the bytes."""
    fits = is_int4(m.node("dequantize")) and _columns(m) % 2 == 0
    return fits and not constant_read(gm, m["zero_point"]).any()


def group_size(m: Match) -> int:
    """Columns that share a scale, all of them where a row has one."""
    scale = m["scale"].meta["val"]
    return _columns(m) // (int(scale.shape[1]) if scale.dim() == 2 else 1)


def _columns(m: Match) -> int:
    return int(m["table"].meta["val"].shape[1])


def constant_read(gm: GraphModule, node: Node) -> Tensor:
    """The tensor that a get_attr node reads."""
    value = required_attribute(gm, str(node.target))
    assert isinstance(value, Tensor)
    return value
