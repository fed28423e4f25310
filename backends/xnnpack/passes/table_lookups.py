"""Lookups of rows of a quantized table: where they stand in a graph, and which have a form."""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.xnnpack.passes.kernel_forms import is_int4
from pt2e_quant.core.qdq import DequantizePerChannel, DequantizePerGroup, required_attribute
from pt2e_quant.graph.ops import EMBEDDING, argument
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.rewrite import Skip

FIND_ROWS = Op(
    EMBEDDING,
    Op(
        DequantizePerChannel,
        Var("table"),
        Var("scale"),
        Var("zero_point"),
        Var("axis"),
        Var("quant_min"),
        Var("quant_max"),
        name="dequantize",
        users=None,
    ),
    Var("indices"),
)
"""A table with a scale for each row."""

FIND_GROUPS = Op(
    EMBEDDING,
    Op(
        DequantizePerGroup,
        Var("table"),
        Var("scale"),
        Var("zero_point"),
        Var("quant_min"),
        Var("quant_max"),
        Var("dtype"),
        name="dequantize",
        users=None,
    ),
    Var("indices"),
)
"""A table with a scale for each group of a row's columns."""


def decline_rows(m: Match, gm: GraphModule) -> Skip | None:
    """Why a match of `FIND_ROWS` has no form here; None if it has."""
    if (declined := _decline(m)) is not None:
        return declined
    if m["axis"] != 0 or constant_read(gm, m["table"]).dtype is not torch.int8:
        return Skip("its table is not int8 per row")
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
    """Whether the rows of a match of `FIND_ROWS` fit into half the bytes."""
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
