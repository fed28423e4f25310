"""Embedding tables kept as int8, one scale per row, or as int4 in groups.

`quantized_decomposed::embedding_byte` and `embedding_4bit` dequantize only the rows that are looked
up. They live in ExecuTorch's quantized kernels, which a device has to link; the portable form does
the same for int8 with operators that every ExecuTorch runtime has.
"""

from collections import Counter

# Registers quantized_decomposed::embedding_byte; nothing of the module is used.
import executorch.exir.passes._quant_patterns_and_replacements  # noqa: F401
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import DequantizePerChannel, DequantizePerGroup, required_attribute
from pt2e_quant.graph.ops import EMBEDDING, argument, aten
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Editor, Rule, Skip, rewrite

__all__ = ["LINKED_KERNELS", "embed_bytes", "embed_portable"]

LINKED_KERNELS = ("quantized_decomposed.embedding_byte", "quantized_decomposed.embedding_4bit")
"""The kernels that a device must link."""

_TABLE = Op(
    DequantizePerChannel,
    Var("table"),
    Var("scale"),
    Var("zero_point"),
    Var("axis"),
    Var("quant_min"),
    Var("quant_max"),
    name="dequantize",
    users=None,
)
_FIND = Op(EMBEDDING, _TABLE, Var("indices"))
_GROUPS = Op(
    DequantizePerGroup,
    Var("table"),
    Var("scale"),
    Var("zero_point"),
    Var("quant_min"),
    Var("quant_max"),
    Var("dtype"),
    name="dequantize",
    users=None,
)
_FIND_GROUPS = Op(EMBEDDING, _GROUPS, Var("indices"))


@graph_pass()
def embed_bytes(gm: GraphModule) -> PassResult:
    """Look rows up with ExecuTorch's kernels for one byte, or half a byte, an integer.

    Before:  embedding(dequantize_per_channel(table_q, scale, zero_point, 0), indices)
    After:   embedding_byte(table_q, scale, None, -127, 127, indices)

    Before:  embedding(dequantize_per_channel_group(table_q, scale, zero_point, -8, 7), indices)
    After:   embedding_4bit(packed, scale, None, -8, 7, indices)

    A table tied to a linear gets a constant of its own, for one that both read would cut the
    delegate; `share_constants` finds the equal bytes in the file. Halves of bytes stand in another
    order in the delegate, so that a table of 4 bits stays twice in the file, which a note says.
    """
    lookups = _Lookups(gm)
    result = rewrite(
        gm,
        (
            Rule("embedding_byte", find=_FIND, build=lookups.of_bytes),
            Rule("embedding_4bit", find=_FIND_GROUPS, build=lookups.of_nibbles),
        ),
    )
    declined = (note for note in result.notes if note.skipped)
    return PassResult(result.changed, (*declined, *lookups.twice))


class _Lookups:
    """Builds calls of ExecuTorch's kernels on the tables of one graph."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        constants = (n for n in gm.graph.nodes if n.op == "get_attr")
        self.reads = Counter(str(n.target) for n in constants for _ in n.users)
        self.twice: list[Note] = []

    def of_bytes(self, m: Match, editor: Editor) -> Node | Skip:
        """int8, a scale for each row."""
        if (declined := _declined(m, self.gm)) is not None:
            return declined
        zero_points = _tensor(self.gm, m["zero_point"])
        zero_point = None
        if zero_points.any():
            name = str(m["zero_point"].target)
            zero_point = editor.constant(f"{name}_float", zero_points.float(), like=m.anchor)
        return editor.call(
            torch.ops.quantized_decomposed.embedding_byte.default,
            self.own("table", m, editor),
            self.own("scale", m, editor),
            zero_point,
            m["quant_min"],
            m["quant_max"],
            m["indices"],
            like=m.anchor,
            val=m.anchor.meta["val"],
        )

    def of_nibbles(self, m: Match, editor: Editor) -> Node | Skip:
        """int4 in groups, two to a byte."""
        if (declined := _declined_groups(m, self.gm)) is not None:
            return declined
        packed = _nibbles(_tensor(self.gm, m["table"]))
        if self.reads[str(m["table"].target)] > 1:
            text = f"its table is in the file twice, {packed.numel():,} bytes more: the delegate's "
            text += "4-bit integers stand in another order; in 8 bits it is there once"
            self.twice.append(Note(m.anchor.name, text))
        return editor.call(
            torch.ops.quantized_decomposed.embedding_4bit.default,
            editor.constant(f"{m['table'].target}_nibbles", packed, like=m.anchor),
            self.own("scale", m, editor),
            None,
            *_INT4,
            m["indices"],
            like=m.anchor,
            val=m.anchor.meta["val"],
        )

    def own(self, name: str, m: Match, editor: Editor) -> Node:
        """A constant that nothing else reads: one shared with a linear would cut the delegate."""
        node: Node = m[name]
        if self.reads[str(node.target)] == 1:
            return node
        copied = _tensor(self.gm, node).clone()
        return editor.constant(f"{node.target}_rows", copied, like=m.anchor)


def _nibbles(table: Tensor) -> Tensor:
    """uint8[rows, columns / 2] of int8[rows, columns]: each plus 8, the even column high."""
    shifted = (table + 8).to(torch.uint8)
    return (shifted[:, ::2] << 4) | shifted[:, 1::2]


@graph_pass()
def embed_portable(gm: GraphModule) -> PassResult:
    """Look rows and their scales up with portable operators.

    Before:  embedding(dequantize_per_channel(table_q, scale, zero_point, 0), indices)
    After:   float(embedding(table_q, indices)) * embedding(scale_column, indices)
    """

    def build(m: Match, editor: Editor) -> Node | Skip:
        if (declined := _declined(m, gm)) is not None:
            return declined
        if _tensor(gm, m["zero_point"]).any():
            return Skip("the portable form has no zero_point")
        name = str(m["scale"].target)
        column = _tensor(gm, m["scale"]).float().unsqueeze(1).clone()
        scales = editor.constant(f"{name}_column", column, like=m.anchor)
        rows = editor.call(aten.embedding.default, m["table"], m["indices"], like=m.anchor)
        cast = editor.call(aten._to_copy.default, rows, dtype=torch.float32, like=m.anchor)
        scale = editor.call(aten.embedding.default, scales, m["indices"], like=m.anchor)
        return editor.call(aten.mul.Tensor, cast, scale, like=m.anchor)

    return rewrite(gm, (Rule("embedding_portable", find=_FIND, build=build),))


_INT4 = (-8, 7)


def _declined_groups(m: Match, gm: GraphModule) -> Skip | None:
    if not all(isinstance(m[v], Node) and m[v].op == "get_attr" for v in ("table", "scale")):
        return Skip("its table is computed at run time")
    table = _tensor(gm, m["table"])
    if (m["quant_min"], m["quant_max"]) != _INT4 or table.dtype is not torch.int8:
        return Skip("its groups are not int4")
    if _tensor(gm, m["zero_point"]).any():
        return Skip("its zero_points are not 0")
    if argument(m.anchor, "scale_grad_by_freq") or argument(m.anchor, "sparse"):
        return Skip("it is a training embedding")
    return None


def _tensor(gm: GraphModule, node: Node) -> Tensor:
    value = required_attribute(gm, str(node.target))
    assert isinstance(value, Tensor)
    return value


def _declined(m: Match, gm: GraphModule) -> Skip | None:
    if not all(isinstance(m[v], Node) and m[v].op == "get_attr" for v in ("table", "scale")):
        return Skip("its table is computed at run time")
    if m["axis"] != 0 or _tensor(gm, m["table"]).dtype is not torch.int8:
        return Skip("its table is not int8 per row")
    if argument(m.anchor, "scale_grad_by_freq") or argument(m.anchor, "sparse"):
        return Skip("it is a training embedding")
    return None
