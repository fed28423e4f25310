"""Convolutions and linears between q and dq become oneDNN's fused integer operators."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.backends.cpu.build_operators import Build, Site, build_conv, build_linear
from pt2e_quant.backends.cpu.post_ops import NO_POST_OP, PostOp, post_op_of
from pt2e_quant.kernels.quantized_values import affine_of, read_weight, requantized
from pt2e_quant.backends.cpu.table import TABLE
from pt2e_quant.core.schemes import Role
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.op_table import OpRow
from pt2e_quant.graph.ops import CONV1D, CONV2D, argument, is_call
from pt2e_quant.graph.pattern import Match, find_matches
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.passes.duplicate_dequantize import one_reader

__all__ = ["fuse_operators"]


@graph_pass(needs=(one_reader,))
def fuse_operators(gm: GraphModule) -> PassResult:
    """Replace dq → conv or linear → post-op → q by one operator on packed weights.

    Before:  q(relu(conv2d(dq(x), dq(w), b)))
    After:   qconv_pointwise(x, …, packed w, …, b, …, uint8, "relu")

    A result that something reads in float stays float; a sum takes its other summand in the
    integers it already has, or in float where either of them is float.
    """
    rows = [row for row in TABLE if any(slot.role is Role.WEIGHT for slot in row.slots)]
    patterns = [(row, op) for row in rows for op in row.find]
    matches = find_matches(gm.graph, patterns, lambda row, match: _fits(gm, row, match))
    editor = Editor(gm)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    runs_at = {match.nodes["op"]: order[_place(match)] for _, match in matches}
    build = Build(editor, order, runs_at)
    for _, match in matches:
        _replace(build, match)
    notes = tuple(Note(match.anchor.name, "fused") for _, match in matches)
    return PassResult(changed=editor.finish(), notes=notes)


def _place(match: Match) -> Node:
    """Where the fused call goes: a sum waits for its other summand."""
    return match.anchor if "add" in match.nodes else match.nodes["op"]


def _fits(gm: GraphModule, row: OpRow, match: Match) -> bool:
    """Whether a match can be packed: its activation uint8, its weight constant, its bias float."""
    affine = affine_of(match["x"])
    if affine is None or affine.dtype is not torch.uint8 or row.refusal(match) is not None:
        return False
    bias = match["b"]
    if isinstance(bias, Node) and constant_of(gm, bias) is None:
        return False
    if read_weight(gm, match["w"]) is None:
        return False
    return (
        not is_call(match.nodes["op"], CONV1D + CONV2D) or _padding(match.nodes["op"]) is not None
    )


def _padding(conv: Node) -> list[int] | None:
    """Padding in numbers, None where "same" pads unevenly."""
    padding = argument(conv, "padding")
    if not isinstance(padding, str):
        return list(padding)
    weight: Any = conv.args[1]
    kernel = weight.meta["val"].shape[2:]
    if padding == "valid":
        return [0] * len(kernel)
    dilation = list(argument(conv, "dilation")) * len(kernel)
    spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=False)]
    return None if any(span % 2 for span in spans) else [span // 2 for span in spans]


@dataclass(frozen=True, slots=True)
class _Ending:
    """The post-op of a match, and the other summand."""

    post_op: PostOp
    added: Node | None


def _ending(match: Match) -> _Ending:
    if "add" in match.nodes:
        has_relu = match.anchor is not match.nodes["add"]
        return _Ending(PostOp("relu") if has_relu else NO_POST_OP, match.node("y"))
    if match.anchor is match.nodes["op"]:
        return _Ending(NO_POST_OP, None)
    found = post_op_of(match.anchor)
    assert found is not None  # the row's pattern takes no others
    return _Ending(found, None)


def _replace(build: Build, match: Match) -> None:
    editor, op, anchor = build.editor, match.nodes["op"], match.anchor
    ending = _ending(match)
    weight = read_weight(editor.gm, match["w"])
    affine = affine_of(match["x"])
    assert weight is not None
    assert affine is not None
    is_conv = is_call(op, CONV1D + CONV2D)
    site = Site(
        op=op,
        anchor=anchor,
        place=_place(match),
        x=editor.now(match["x"].args[0]),
        affine=affine,
        weight=weight,
        bias=match["b"],
        padding=tuple(_padding(op) or ()) if is_conv else (),
        post_op=ending.post_op,
        added=ending.added,
        output=requantized(anchor),
    )
    made = build_conv(build, site) if is_conv else build_linear(build, site)
    for reader in made.replaces:
        editor.replace(reader, made.node)
    read = [match["x"], match["w"], *([ending.added] if ending.added is not None else [])]
    editor.discard([*match.covered, *read])
