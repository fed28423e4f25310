"""torch.export.export, without a remark that no user can act on, and without merging inputs."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.utils import _pytree as pytree

from pt2e_quant.core.errors import Pt2eQuantWarning

_FLAT_WEIGHTS = (
    r"The tensor attributes? (self\.[\w.]*_flat_weights\[\d+\](, )?)+ (was|were) assigned"
)


def export(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """Export a module, as torch does, but for its warning about `nn.LSTM` and its kind.

    torch 2.13 takes their list of weights for tensors that the model assigns. And of an input that
    is given twice, as the zeros of two states are, its program reads one place alone: such inputs
    are given apart.
    """
    given, named = _apart((tuple(args), dict(kwargs or {})))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", _FLAT_WEIGHTS, UserWarning)
        return torch.export.export(module, given, named, dynamic_shapes=dynamic_shapes)


def _apart(inputs: Any) -> Any:
    """Inputs in which no tensor stands twice: copies stand in the later places."""
    seen: set[int] = set()

    def apart(value: Tensor) -> Tensor:
        if id(value) in seen:
            return value.clone()
        seen.add(id(value))
        return value

    return pytree.tree_map_only(Tensor, apart, inputs)


def warn_of_merged_inputs(program: ExportedProgram) -> None:
    """Warn of inputs that were one tensor when torch captured a program, which reads one alone.

    Warns:
        Pt2eQuantWarning: naming them.
    """
    leaves = pytree.tree_leaves(program.example_inputs, is_leaf=lambda value: value is None)
    # The last ones are the user's. A copied program may have other names than its signature.
    nodes = program.graph.find_nodes(op="placeholder")[-len(leaves) :]
    if len(leaves) != len(program.graph_signature.user_inputs) or len(leaves) != len(nodes):
        return
    by_tensor: dict[int, list[Node]] = {}
    for leaf, node in zip(leaves, nodes, strict=True):
        if isinstance(leaf, Tensor):
            by_tensor.setdefault(id(leaf), []).append(node)
    for same in by_tensor.values():
        read = [node.name for node in same if node.users]
        names = ", ".join(node.name for node in same)
        if 0 < len(read) < len(same):
            warnings.warn(
                f"the inputs {names} were one tensor when torch.export captured the program: it "
                f"reads {', '.join(read)} alone and ignores the others. Export the "
                "model with a tensor of its own for each input",
                Pt2eQuantWarning,
                stacklevel=4,
            )
