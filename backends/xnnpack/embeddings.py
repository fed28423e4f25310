"""Embedding tables kept as int8, one scale per row.

`quantized_decomposed::embedding_byte` dequantizes only the rows that are looked up. It lives in
ExecuTorch's quantized kernels, which a device has to link; the portable form does the same with
operators that every ExecuTorch runtime has.
"""

# Registers quantized_decomposed::embedding_byte; nothing of the module is used.
import executorch.exir.passes._quant_patterns_and_replacements  # noqa: F401
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import DequantizePerChannel, required_attribute
from pt2e_quant.graph.ops import EMBEDDING, argument, aten
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import PassResult, graph_pass
from pt2e_quant.graph.rewrite import Editor, Rule, Skip, rewrite

__all__ = ["BYTE_KERNEL", "embed_bytes", "embed_portable"]

BYTE_KERNEL = "quantized_decomposed.embedding_byte"
"""The kernel that a device must link."""

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


@graph_pass()
def embed_bytes(gm: GraphModule) -> PassResult:
    """Look rows up with ExecuTorch's byte kernel.

    Before:  embedding(dequantize_per_channel(table_q, scale, zero_point, 0), indices)
    After:   embedding_byte(table_q, scale, None, -127, 127, indices)
    """

    def build(m: Match, editor: Editor) -> Node | Skip:
        if (declined := _declined(m, gm)) is not None:
            return declined
        zero_points = _tensor(gm, m["zero_point"])
        zero_point = None
        if zero_points.any():
            name = str(m["zero_point"].target)
            zero_point = editor.constant(f"{name}_float", zero_points.float(), like=m.anchor)
        return editor.call(
            torch.ops.quantized_decomposed.embedding_byte.default,
            m["table"],
            m["scale"],
            zero_point,
            m["quant_min"],
            m["quant_max"],
            m["indices"],
            like=m.anchor,
            val=m.anchor.meta["val"],
        )

    return rewrite(gm, (Rule("embedding_byte", find=_FIND, build=build),))


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
