"""The graph module of an exported program, whatever its submodules are named."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature
from torch.fx import GraphModule

_TAKEN = frozenset(dir(GraphModule)) - frozenset(dir(nn.Module)) | {"meta"}
"""A graph module's own attributes: a submodule cannot be named "graph" or "code"."""


def graph_module_of(program: ExportedProgram) -> GraphModule:
    """`program.module()`, with "_" behind names of submodules that a graph module uses itself.

    The tensors are the program's own.
    """
    names = {name.partition(".")[0] for name in (*program.state_dict, *program.constants)}
    new = {name: _free_name(name, names) for name in names & _TAKEN}
    module = (_renamed(program, new) if new else program).module()
    assert isinstance(module, GraphModule)
    return module


def _free_name(name: str, names: set[str]) -> str:
    while name in names or name in _TAKEN:
        name += "_"
    return name


def _renamed(program: ExportedProgram, new: Mapping[str, str]) -> ExportedProgram:
    def rename(target: str | None) -> str | None:
        if target is None:
            return None
        head, dot, rest = target.partition(".")
        return f"{new.get(head, head)}{dot}{rest}"

    def all_renamed(held: Mapping[str, Any]) -> dict[str, Any]:
        return {str(rename(name)): value for name, value in held.items()}

    signature = program.graph_signature
    renamed = copy.copy(program)
    renamed._graph_signature = ExportGraphSignature(
        input_specs=[replace(spec, target=rename(spec.target)) for spec in signature.input_specs],
        output_specs=[_written(spec, rename) for spec in signature.output_specs],
    )
    renamed._state_dict = all_renamed(program.state_dict)
    renamed._constants = all_renamed(program.constants)
    return renamed


def _written(spec: Any, rename: Any) -> Any:
    """An output's spec: a buffer that is written goes by its name, an input by its own."""
    is_input = "USER_INPUT" in spec.kind.name
    return spec if is_input else replace(spec, target=rename(spec.target))
