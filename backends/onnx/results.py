"""Split a call's result into what an ONNX model can return and what it cannot."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from pt2e_quant.core.leaf_paths import leaf_paths
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.subgraphs import copy_graph


class ResultKind(StrEnum):
    """The kind of one leaf of the result."""

    TENSOR = "tensor"
    COMPLEX = "complex"
    INTEGER = "integer"
    LITERAL = "literal"


@dataclass(frozen=True, slots=True)
class ResultLeaf:
    """One leaf of the result's pytree.

    Args:
        kind: a tensor, one of complex numbers (which the model gives as pairs of real ones), a
            run-time integer, or a literal that ONNX cannot give.
        value: the position among the model's outputs; of a literal, the literal.
    """

    kind: ResultKind
    value: bool | int | float | str | None


def split_results(gm: GraphModule) -> tuple[GraphModule, tuple[ResultLeaf, ...]]:
    """A graph that returns a flat tuple of distinct tensors, and where each leaf comes from.

    The exporter drops a None, fails on a number, and returns a tensor that stands twice in the
    result under one name. The given graph is not changed; constants are shared.
    """
    flat = copy_graph(gm)
    output = flat.graph.output_node()
    kept: list[Node] = []
    leaves = []
    for value in pytree.tree_leaves(output.args[0], is_leaf=lambda v: v is None):
        if not isinstance(value, Node):
            leaves.append(ResultLeaf(ResultKind.LITERAL, value))
            continue
        if value not in kept:
            kept.append(value)
        leaves.append(ResultLeaf(_kind_of(value), kept.index(value)))
    output.args = (tuple(_in_reals(flat, value) for value in kept),)
    codegen: Any = flat.graph._codegen
    if getattr(codegen, "pytree_info", None) is not None:
        spec = pytree.tree_structure(tuple(range(len(kept))))
        codegen.pytree_info = codegen.pytree_info._replace(out_spec=spec)
    flat.recompile()
    return flat, tuple(leaves)


def _kind_of(value: Node) -> ResultKind:
    held = value.meta.get("val")
    if not isinstance(held, Tensor):
        return ResultKind.INTEGER
    return ResultKind.COMPLEX if held.is_complex() else ResultKind.TENSOR


def _in_reals(flat: GraphModule, value: Node) -> Node:
    if _kind_of(value) is not ResultKind.COMPLEX:
        return value
    return Editor(flat).call(torch.ops.aten.view_as_real.default, value, like=value, after=value)


def join_results(leaves: Sequence[ResultLeaf], tensors: Sequence[Tensor]) -> list[Any]:
    """The leaves of the float module's result from the model's outputs."""
    found: list[Any] = []
    for leaf in leaves:
        if leaf.kind is ResultKind.LITERAL:
            found.append(leaf.value)
            continue
        assert isinstance(leaf.value, int)
        found.append(_FROM_MODEL[leaf.kind](tensors[leaf.value]))
    return found


_FROM_MODEL: Mapping[ResultKind, Callable[[Tensor], Any]] = {
    ResultKind.TENSOR: lambda tensor: tensor,
    ResultKind.COMPLEX: torch.view_as_complex,
    ResultKind.INTEGER: int,
}


def result_names(gm: GraphModule, leaves: Sequence[ResultLeaf]) -> list[str]:
    """A name for each output of the model: its keys or fields in the result, else its position."""
    spec = capture_of(gm).out_spec
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    names: dict[object, str] = {}
    unnamed: list[pytree.KeyPath] = [(pytree.SequenceKey(at),) for at in range(spec.num_leaves)]
    for path, leaf in zip(leaf_paths(tree) or unnamed, leaves, strict=True):
        if leaf.kind is not ResultKind.LITERAL:
            names.setdefault(leaf.value, _name(path))
    return list(names.values())


def _name(path: Sequence[Any]) -> str:
    keys = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", "")))) for k in path]
    name = "_".join(keys)
    return name if name.isidentifier() else f"output_{name}".rstrip("_")
